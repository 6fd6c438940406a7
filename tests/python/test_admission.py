# SPDX-License-Identifier: Apache-2.0
"""What tiers take, for how long and whose it is, as Python's users say it (C++: store_admission_test.cpp)."""

import time

import numpy as np
import pytest

import kvstride as kv
from kvstride.vllm.offload.options import TierOptions, faults

SPACE = kv.Namespace(
    model="test/admission",
    revision="0123abcd",
    planes={"key": "f32", "value": "f32"},
    num_layers=2,
    num_kv_heads=2,
    head_size=8,
    block_size=4,
)
RAW = kv.Namespace(
    model="test/admission",
    revision="0123abcd",
    planes={"state": "u8"},
    num_layers=1,
    num_kv_heads=1,
    head_size=1,
    block_size=1,
    raw="rank=0",
)
BYTES = 3 * 4096
IMAGE = BYTES + 4096
KEYS = [kv.Key(bytes([i])) for i in range(32)]


def buffers(count):
    return [np.full(BYTES, i, np.uint8) for i in range(count)]


def put(store, *numbers, tenant=None):
    return store.put_bytes([KEYS[i] for i in numbers], buffers(len(numbers)), tenant=tenant).wait()


def counters(tier):
    return tier.metrics()["counters"]


@pytest.fixture(params=["host", "directory"])
def tier(request, tmp_path):
    def make(**admission):
        rules = kv.Admission(**admission)
        if request.param == "host":
            return kv.HostTier(2**20, admission=rules)
        return kv.DirectoryTier(tmp_path / "store", 2**24, keep_free=0, staging_bytes=2**20, admission=rules)

    return make


def test_the_second_ask_is_written(tier):
    one = tier(min_reuse=2)
    cache = kv.Cache(np.ones((2, 1, 2, 4, 2, 8), np.float32), "L B KV N H D")
    with kv.Store(one, namespace=SPACE) as store:
        assert store.put(KEYS[:1], cache, [0]).wait() == ["refused"]
        assert store.get(KEYS[:1], cache, [0]).wait() == ["miss"]
        assert store.put(KEYS[:1], cache, [0]).wait() == ["ok"]
        assert store.get(KEYS[:1], cache, [0]).wait() == ["ok"]
    assert counters(one)["writes"] == 1
    assert counters(one)["not_admitted_seldom"] == 1


def test_a_write_budget(tier):
    one = tier(write_bytes_per_day=1, write_burst=2 * IMAGE)
    with kv.Store(one, namespace=RAW) as store:
        assert [put(store, i)[0] for i in range(4)] == ["ok", "ok", "refused", "refused"]
    assert counters(one)["write_bytes"] == 2 * IMAGE
    assert counters(one)["not_admitted_budget"] == 2


def test_what_is_too_old_is_a_miss(tier):
    one = tier(ttl=0.5)
    with kv.Store(one, namespace=RAW) as store:
        assert put(store, 0) == ["ok"]
        time.sleep(0.6)
        assert store.get_bytes(KEYS[:1], buffers(1)).wait() == ["miss"]
        assert put(store, 0) == ["ok"]
    assert counters(one)["expired"] == 1
    assert counters(one)["writes"] == 2


def test_tenants(tier):
    one = tier(tenant_bytes=IMAGE, bytes_of_tenant={"big": 3 * IMAGE, "none": 0})
    with kv.Store(one, namespace=RAW) as store:
        assert [put(store, i, tenant="a")[0] for i in (0, 1)] == ["ok", "refused"]
        assert [put(store, i, tenant="b")[0] for i in (2, 3)] == ["ok", "refused"]
        assert [put(store, i)[0] for i in (4, 5)] == ["ok", "refused"]
        assert [put(store, i, tenant="big")[0] for i in (6, 7, 8, 9)] == ["ok", "ok", "ok", "refused"]
        assert put(store, 10, tenant="none") == ["refused"]
        assert store.remove(KEYS[:1]) == 1
        assert put(store, 1, tenant="a") == ["ok"]
    assert counters(one)["not_admitted_quota"] == 5


def test_a_getter_pays_for_what_is_promoted(tmp_path):
    upper = kv.HostTier(2**20, admission=kv.Admission(bytes_of_tenant={"poor": 0}))
    lower = kv.DirectoryTier(tmp_path / "store", 2**24, keep_free=0)
    with kv.Store([lower], namespace=RAW) as store:
        assert put(store, 0) == ["ok"]
    with kv.Store([upper, lower], namespace=RAW) as store:
        assert store.get_bytes(KEYS[:1], buffers(1), tenant="poor").wait() == ["ok"]
        assert store.prefetch(KEYS[:1], tenant="poor").wait() == ["refused"]
        assert counters(upper)["writes"] == 0
        assert store.prefetch(KEYS[:1]).wait() == ["ok"]
        assert store.flush()
        assert counters(upper)["writes"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_reuse": 0}, "Admission: min_reuse is 0, it must be from 1 to 15"),
        ({"min_reuse": 16}, "Admission: min_reuse is 16, it must be from 1 to 15"),
        ({"reuse_window": 0}, "Admission: reuse_window is 0, it must be from 1 to 1073741824"),
        ({"write_bytes_per_day": 0}, "Admission: write_bytes_per_day is 0, it must be from 1 to 1152921504606846976"),
        ({"write_burst": 5}, "Admission: write_burst needs write_bytes_per_day"),
        ({"ttl": 0}, "Admission: ttl is 0, expected seconds above 0, at most 1e9"),
        ({"ttl": float("nan")}, "Admission: ttl is nan, expected seconds above 0, at most 1e9"),
        ({"ttl": "1h"}, "Admission: ttl is '1h', expected seconds above 0, at most 1e9"),
        ({"tenant_bytes": -1}, "Admission: tenant_bytes is -1, it must be from 1 to 1152921504606846976"),
        ({"bytes_of_tenant": {"a": -1}}, "Admission: bytes_of_tenant['a'] is -1, it must be from 0 to 115"),
        ({"bytes_of_tenant": [1]}, "Admission: bytes_of_tenant is list, expected a mapping from tenant to bytes"),
        ({"bytes_of_tenant": {7: 1}}, "Admission: bytes_of_tenant: tenant is int, expected a str"),
        ({"bytes_of_tenant": {"x" * 257: 1}}, "Admission: bytes_of_tenant: tenant has 257 bytes, at most 256"),
    ],
)
def test_arguments_are_checked(given, message):
    with pytest.raises(kv.ArgumentError) as caught:
        kv.Admission(**given)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{"min_reuse": 1.5}, {"min_reuse": True}, {"tenant_bytes": "many"}])
def test_kinds_of_arguments_are_checked(given):
    with pytest.raises(kv.DTypeError):
        kv.Admission(**given)


def test_tiers_refuse_what_is_no_admission(tmp_path):
    for make in (
        lambda: kv.HostTier(2**20, admission={"min_reuse": 2}),
        lambda: kv.DirectoryTier(tmp_path, 2**24, admission={"min_reuse": 2}),
        lambda: kv.RemoteTier("redis://localhost", admission={"min_reuse": 2}),
    ):
        with pytest.raises(kv.ArgumentError, match="Tier: admission is dict, expected an Admission"):
            make()


def test_tenants_are_checked():
    with kv.HostTier(2**20) as one, kv.Store(one, namespace=RAW) as store:
        with pytest.raises(kv.ArgumentError, match="put_bytes: tenant is int, expected a str"):
            put(store, 0, tenant=7)
        with pytest.raises(kv.ArgumentError, match="put_bytes: tenant has 257 bytes, at most 256 are allowed"):
            put(store, 0, tenant="x" * 257)
        with pytest.raises(kv.ArgumentError, match="put_bytes: tenant is not UTF-8"):
            put(store, 0, tenant="\udc80")
        assert put(store, 0, tenant="x" * 256) == ["ok"]


def test_vllms_configuration_has_it():
    given = {
        "root_dir": "/x",
        "max_bytes": 1e9,
        "remote": "redis://h",
        "admission": {"min_reuse": 2, "write_bytes_per_day": 1e13, "write_burst": 1e11, "ttl": 604800},
        "remote_admission": {"min_reuse": 3, "reuse_window": 1000},
    }
    read = TierOptions.parse(given, "here")
    assert read.admission == kv.Admission(min_reuse=2, write_bytes_per_day=1e13, write_burst=1e11, ttl=604800)
    assert read.remote_admission == kv.Admission(min_reuse=3, reuse_window=1000)
    assert read.taking_everything().admission is None
    assert TierOptions.parse({"root_dir": "/x", "max_bytes": 1e9}, "here").admission is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"admission": 2}, "here: admission is 2, expected an object such as {'min_reuse': 2}"),
        ({"admission": {"min_reuse": 16}}, "here: admission: min_reuse is 16, it must be from 1 to 15"),
        ({"admission": {"min_reuse": "2"}}, "here: admission: min_reuse is '2', must be a whole number"),
        ({"admission": {"min_use": 2}}, "here: admission: unknown option 'min_use'; did you mean 'min_reuse'?"),
        ({"admission": {"tenant_bytes": 2}}, "here: admission: unknown option 'tenant_bytes'; known are min_reuse, re"),
        (
            {"remote_admission": {"ttl": 2}},
            "here: remote_admission: unknown option 'ttl'; known are min_reuse, reuse_w",
        ),
    ],
)
def test_vllms_configuration_is_checked(given, message):
    [fault] = faults({"root_dir": "/x", "max_bytes": 1e9, **given}, "here")
    assert fault.startswith(message)
