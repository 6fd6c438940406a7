// SPDX-License-Identifier: Apache-2.0
// Functions that are compiled for the host and, by nvcc, for the device too.
#pragma once

#ifdef __CUDACC__
#define KVSTRIDE_HD __host__ __device__
#else
#define KVSTRIDE_HD
#endif
