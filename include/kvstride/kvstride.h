// SPDX-License-Identifier: Apache-2.0
// Everything public in one include.
#pragma once

#include "kvstride/attention.h"
#include "kvstride/blocks.h"
#include "kvstride/cache.h"
#include "kvstride/cpu.h"
#include "kvstride/detect.h"
#include "kvstride/device.h"
#include "kvstride/dtype.h"
#include "kvstride/error.h"
#include "kvstride/geometry.h"
#include "kvstride/identity.h"
#include "kvstride/layout.h"
#include "kvstride/order.h"
#include "kvstride/plan.h"
#include "kvstride/registry.h"
#include "kvstride/store.h"
#include "kvstride/threads.h"
#include "kvstride/version.h"
