"""Run by test_host_pool.py in a process of its own: SGLang's host pool and storages without a server.

The second of two ranks, a middle stage, and a storage that breaks in every way.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvtuner.errors import ServingError
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.runtime_loader.host_tier.stored_page import HEADER_BYTES
from kvtuner.runtime_loader.host_tier.transfer import TorchMover
from kvtuner.runtime_loader.sglang.compat.hierarchical_cache import HostOptions
from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks
from kvtuner.runtime_loader.sglang.hicache import checked_storage as storage
from kvtuner.runtime_loader.sglang.hicache import host_pool as host_pool_module
from kvtuner.runtime_loader.sglang.hicache import page_identity as identity_module
from kvtuner.runtime_loader.sglang.hicache import tier as tier_module
from kvtuner.runtime_loader.sglang.hicache.host_pool import check_host_pool
from kvtuner.runtime_loader.sglang.pools import packed_pool as pool_module
from kvtuner.runtime_loader.sglang.pools.dense_pool import PackedKVPool
from kvtuner.runtime_loader.sglang.process_state import RankState, process_state
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from sglang.srt.mem_cache.device_pool_info import MHABufferInfo

START, STOP, SIZE = 1, 4, 48
PROFILE, FOLDER, PAGE = load_profile(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
RANKS = ParallelRanks(tp_rank=1, tp_size=2, pp_rank=0, world_rank=0)
HEADS, DIM = 1, 16
GB = 2e-3

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
process_state().rank = RankState(PROFILE, "cache", TorchAttention(), gqa=2, logit_cap=0.0)
pool_module.announce = lambda *_: None
tier = tier_module.HostTier()
pool_module.ranks = tier_module.ranks = lambda: RANKS
host_pool_module.allocator_type = lambda: "default"
REFUSED: dict[str, int] = {}


class Metrics:
    moved = took = staticmethod(lambda *_: None)

    def refused(self, fault: str, count: int) -> None:
        REFUSED[fault] = REFUSED.get(fault, 0) + count


MODEL = torch.nn.Linear(4, 4)


def config_named(name: str, rope: int = 1, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    """Return what stands for SGLang's ModelConfig."""
    text = json.dumps({"_name_or_path": name, "rope": rope})
    return SimpleNamespace(hf_config=SimpleNamespace(to_json_string=lambda use_diff: text), dtype=dtype)


CONFIG = config_named("a")
DENSE = {
    "page_size": PAGE, "dtype": torch.bfloat16, "head_num": HEADS, "head_dim": DIM, "layer_num": STOP - START,
    "device": "cpu", "enable_memory_saver": False, "start_layer": START, "end_layer": STOP,
}  # fmt: skip


def options(**changes: object) -> HostOptions:
    given = {"ratio": 2.0, "size_gb": 0, "layout": "page_first"}
    return HostOptions(**{**given, "storage": "file", "extra": None, **changes})


def rank_of(*, packed: bool) -> identity_module.PageSource:
    return identity_module.PageSource(PROFILE, "cache", packed, MODEL, CONFIG, make_mover=TorchMover, agreement_s=1)


def host_pool(device_pool: object, *, packed: bool = True, zero_copy: bool = False, **changes: object):
    rank = rank_of(packed=packed)
    own = identity_module.PageIdentity(rank, RANKS, range(START, STOP), PAGE)
    pool = host_pool_module.PackedHostPool(
        device_pool, tier_module.layers_of(rank, device_pool), own, Metrics(), options(**changes), page_size=PAGE,
        zero_copy=zero_copy,
    )  # fmt: skip
    check_host_pool(pool)
    return pool


def refused(call, *messages: str) -> None:
    try:
        call()
    except ServingError as error:
        assert all(word in str(error) for word in messages), error
    else:
        raise AssertionError(f"not refused: {messages}")


packed_pool = PackedKVPool(SIZE, **DENSE)
dense_pool = MHATokenToKVPool(SIZE, **DENSE)

# Bytes: the formula's; tokens for the same gigabytes: more than SGLang's own host pool by the profile's ratio.
per_token = sum(PROFILE.row_shape(2).pair_bytes(pair) for pair in PROFILE.pairs[START:STOP])
native = 2 * 2 * HEADS * DIM * (STOP - START)
stock_options = {"pin_memory": False}
if hasattr(dense_pool, "get_device_pool_infos"):
    stock_options |= {"device_capacity_tokens": SIZE, "start_layer": START, "end_layer": STOP}
    device: MHABufferInfo | MHATokenToKVPool = dense_pool.get_device_pool_infos()[0].buffer_info
else:  # SGLang 0.5.22, whose host pools take the device's whole pool
    device = dense_pool
stock = MHATokenToKVPoolHost(device, 2.0, GB, PAGE, "page_first", **stock_options)
assert stock.size_per_token == native
for packed, device_pool in ((True, packed_pool), (False, dense_pool)):
    sized = host_pool(device_pool, packed=packed, size_gb=GB)
    assert sized.size_per_token == per_token, (sized.size_per_token, per_token)
    assert sized.size == (int(GB * 1e9) // per_token // PAGE + 1) * PAGE
    assert abs(sized.size / stock.size - native / per_token) < 3 * PAGE / stock.size
    assert sized.kv_buffer.nbytes == sized.size * per_token
    by_ratio = host_pool(device_pool, packed=packed)
    assert by_ratio.size == (2 * SIZE // PAGE + 1) * PAGE

# What SGLang sizes host pools by, when it is to find out what fits, is what is kept there.
tier.begin(rank_of(packed=True), packed_pool)
assert packed_pool.host_capacity_bytes is None
assert sum(packed_pool.get_kv_size_bytes()) == per_token * (SIZE + PAGE)
tier.begin(rank_of(packed=False), dense_pool)
assert dense_pool.host_capacity_bytes == per_token * SIZE
mismatched = MHATokenToKVPool(SIZE, **{**DENSE, "head_num": 2})
refused(lambda: tier.begin(rank_of(packed=False), mismatched), "(2, 16)", "(1, 16)")

# A page by SGLang's generic path: out to a file, back in, elsewhere.
generator = torch.Generator().manual_seed(3)
for rows in (*packed_pool.k_buffer, *packed_pool.v_buffer):
    rows.view(torch.uint8).copy_(
        torch.randint(256, rows.view(torch.uint8).shape, dtype=torch.uint8, generator=generator)
    )
pool = host_pool(packed_pool)


def slots(*pages: int) -> torch.Tensor:
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])


def config_of(folder: Path, model_name: str = "served", **extra: object) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name=model_name,
        extra_config={"file_storage_path": str(folder), **extra},
    )  # fmt: skip


def opened(pool: object, config: object, name: str = "file", backend: object = None) -> object:
    """Open a storage as SGLang does."""

    def create(_: str, config: object) -> object:
        return backend or storage.PageFiles(config)

    found = tier.open(create, name, config, pool)
    found.register_mem_pool_host(pool)
    return found


def read(opened: object, pool: object, keys: list[str]) -> list[torch.Tensor | None]:
    return opened.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])


pool.backup_from_device_all_layer(packed_pool, slots(0, 1), slots(2, 1), "kernel")
KEYS = ["a" * 64, "b" * 64]
tier._rank = rank_of(packed=True)
files = opened(pool, config_of(FOLDER / "pages"))
assert type(files).__name__ == "PageFiles"
assert files.batch_set(KEYS, [pool.get_data_page(torch.tensor(page * PAGE)) for page in (0, 1)])
assert files.batch_exists([*KEYS, "c" * 64]) == 2
assert files.exists(KEYS[0])
assert not files.exists("c" * 64)
pages = read(files, pool, [*KEYS, "c" * 64])
assert pages[2] is None
assert not REFUSED, REFUSED
before = [rows[PAGE : 3 * PAGE].clone() for rows in (*packed_pool.k_buffer, *packed_pool.v_buffer)]
pool.kv_buffer.zero_()
for page, data in enumerate(pages[:2]):
    pool.set_from_flat_data_page(torch.tensor((page + 1) * PAGE), data)
for layer in range(STOP - START):
    pool.load_to_device_per_layer(packed_pool, slots(1, 2), slots(2, 1), layer, "kernel")
for rows, old in zip((*packed_pool.k_buffer, *packed_pool.v_buffer), before, strict=True):
    assert torch.equal(rows[PAGE : 3 * PAGE].view(torch.uint8), old.view(torch.uint8))

# A server of another profile, model, dtype, reading or number of ranks has other keys and other pages.
digests = {pool.identity.digest}
base = rank_of(packed=True)


def identity(rank=base, ranks=RANKS, layers=range(START, STOP), page=PAGE):
    return identity_module.PageIdentity(rank, ranks, layers, page)


def changed(**fields):
    return identity_module.PageSource(**{**{name: getattr(base, name) for name in base.__dataclass_fields__}, **fields})


assert identity().digest == identity(changed(config=config_named("b"))).digest == pool.identity.digest
for number, other in enumerate((
    identity(changed(profile=load_profile(sys.argv[4]))), identity(changed(config=config_named("a", rope=2))),
    identity(changed(config=config_named("a", dtype=torch.float16))),
    identity(changed(attend="fresh")), identity(changed(packed=False)), identity(changed(model=torch.nn.Linear(4, 4))),
    identity(page=PAGE + 1), identity(layers=range(2, 5)), identity(ranks=ParallelRanks(0, 2, 0, 0)),
    identity(ranks=ParallelRanks(1, 4, 0, 0)), identity(ranks=ParallelRanks(1, 2, 1, 0)),
), start=2):  # fmt: skip
    digests.add(other.digest)
    assert len(digests) == number, number

# Weights that change: no storage until a flush, and then no page of those before, which stay for who has them.
tier._pools.append(pool)
tier.suspend(None)
assert read(files, pool, KEYS) == [None, None]
assert files.batch_exists(KEYS) == 0
assert not files.batch_set(["f" * 64], [pool.get_data_page(slots(1)[0])])
first = MODEL.weight.detach().clone()
with torch.no_grad():
    MODEL.weight[0, 0] += 1
pool.clear()
assert read(files, pool, KEYS) == [None, None]
assert files.batch_exists(KEYS) == 0
assert files.batch_set(KEYS, [pool.get_data_page(slots(1)[0]), pool.get_data_page(slots(2)[0])])
assert all(page is not None for page in read(files, pool, KEYS))
assert not REFUSED, REFUSED
tier.suspend(True)  # a session of changes: a flush before its end changes nothing
with torch.no_grad():
    MODEL.weight.copy_(first)
pool.clear()
assert pool.identity.digest is None
tier.suspend(False)
assert pool.identity.digest is None
pool.clear()
assert all(page is not None for page in read(files, pool, KEYS))
paths = sorted((FOLDER / "pages").iterdir())
assert len(paths) == 4

# A page of others under a name of ours, however it came there, and one that cannot be read: refused, and made room for.
tag = pool.identity.digest.hex()[:24]
mine = next(path for path in paths if path.name.startswith(KEYS[0]) and tag in path.name)
others = next(path for path in paths if path.name.startswith(KEYS[0]) and path != mine)
mine.write_bytes(others.read_bytes())
assert read(files, pool, KEYS[:1]) == [None]
assert REFUSED == {"identity": 1}, REFUSED
assert not mine.exists()
mine.mkdir()
assert read(files, pool, KEYS[:1]) == [None]
assert REFUSED == {"identity": 1, "unreadable": 1}, REFUSED
assert files.batch_set(KEYS[:1], [pool.get_data_page(slots(1)[0])])
assert read(files, pool, KEYS[:1])[0] is not None
others.unlink()

# The disk: full, read-only, gone. Nothing that is not whole is ever there.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES, hard))
try:
    assert not files.batch_set(["d" * 64], [pool.get_data_page(slots(1)[0])])
finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert not files.exists("d" * 64)
assert len(list((FOLDER / "pages").iterdir())) == 3
assert all(page is not None for page in read(files, pool, KEYS))
moved = FOLDER / "pages-away"
(FOLDER / "pages").rename(moved)
assert not files.batch_set(["e" * 64], [pool.get_data_page(slots(1)[0])])
assert read(files, pool, KEYS) == [None, None]
assert not (FOLDER / "pages").exists(), "a mount that went away must not be replaced"
moved.rename(FOLDER / "pages")

# Clearing removes this rank's own pages alone.
stranger = FOLDER / "pages" / f"{'a' * 64}_another.bin"
stranger.write_bytes(b"theirs")
left, written = (FOLDER / "pages" / name for name in (".left.tmp", ".written.tmp"))
for path in (left, written):
    path.write_bytes(b"half")
os.utime(left, (0, 0))
theirs = {path for path in (FOLDER / "pages").iterdir() if pool.identity.digest.hex()[:24] not in path.name}
assert len(theirs) == 4
assert files.clear()
assert set((FOLDER / "pages").iterdir()) == theirs - {left}
refused(lambda: storage.PageFiles(config_of(FOLDER, "x" * 200)), "--served-model-name")


# Storages that read the host pool themselves: two objects for a page, a header among them.
class Objects(HiCacheStorage):
    """A storage like Mooncake: keys and values of a page as objects, copied by address."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def _each(self, keys, host_indices):
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        names = [f"{key}_{part}" for key in keys for part in "kv"]
        assert len(names) == len(addresses) == len(sizes)
        return zip(names, addresses, sizes, strict=True)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        for name, address, size in self._each(keys, host_indices):
            self.objects[name] = ctypes.string_at(address, size)
        return [True] * len(keys)

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        there = []
        for name, address, size in self._each(keys, host_indices):
            data = self.objects.get(name, b"")
            there.append(len(data) == size)
            ctypes.memmove(address, data, len(data))
        return [k and v for k, v in zip(there[::2], there[1::2], strict=True)]

    def get(self, *_, **__):
        raise NotImplementedError

    batch_get = set = batch_set = get

    def exists(self, key):
        return f"{key}_v" in self.objects


aware = host_pool(packed_pool, zero_copy=True, storage="dynamic")
config = config_of(FOLDER, interface_v1=1)
objects = opened(aware, config, "dynamic", Objects())
NAMES = [f"{key}-{aware.identity.digest.hex()[:24]}" for key in KEYS]
aware.backup_from_device_all_layer(packed_pool, slots(3, 4), slots(1, 2), "kernel")
wanted = [aware.pages.record(page)[HEADER_BYTES:].clone() for page in (3, 4)]
assert objects.batch_set_v1(KEYS, slots(3, 4)) == [True, True]
assert len(objects.objects) == 4
assert sum(map(len, objects.objects.values())) == 2 * aware.pages.layout.record_bytes
aware.kv_buffer.zero_()
REFUSED.clear()
assert objects.batch_get_v1([*KEYS, "c" * 64], slots(5, 0, 1)) == [True, True, False]
assert [torch.equal(aware.pages.record(page)[HEADER_BYTES:], data) for page, data in zip((5, 0), wanted, strict=True)]
assert not REFUSED
for part, fault in (("k", "identity"), ("v", "checksum")):
    kept = objects.objects[f"{NAMES[0]}_{part}"]
    objects.objects[f"{NAMES[0]}_{part}"] = kept[:40] + bytes([kept[40] ^ 1]) + kept[41:]
    assert objects.batch_get_v1(KEYS, slots(5, 0)) == [False, True]
    assert REFUSED.pop(fault) == 1, REFUSED
    objects.objects[f"{NAMES[0]}_{part}"] = kept
objects.objects[f"{NAMES[0]}_v"] = objects.objects[f"{NAMES[1]}_v"]
assert objects.batch_get_v1(KEYS, slots(5, 0)) == [False, True]
refused(lambda: host_pool(packed_pool, zero_copy=True, layout="layer_first", storage="mooncake"), "page_first")
refused(lambda: opened(pool, config, "dynamic"), "restart with --hicache-storage-backend dynamic")
refused(lambda: opened(aware, config_of(FOLDER)), "restart with --hicache-storage-backend file")
objects.objects.clear()
assert not objects.clear()

# What is refused by name, and SGLang's own host pools, which are left alone.
refused(lambda: storage.check_storage("hf3fs", {}), "hf3fs takes keys for as long as values", "use one of file")
for backend in ("nixl", "eic"):
    refused(
        lambda name=backend: storage.check_storage(name, {}), f"--hicache-storage-backend {backend} was never tried"
    )
refused(lambda: storage.check_storage("juicefs", {}), "needs to know where it is mounted")
refused(lambda: storage.check_storage("juicefs", {"mount_point": str(FOLDER)}), "nothing is mounted at")
refused(lambda: storage.check_storage("lmcache", {}), "use --enable-lmcache in place of")
assert tier.open(lambda name, _: name, "nixl", None, stock) == "nixl"
mounted = next(
    (path for path in ("/dev/shm", "/run", "/proc") if os.path.ismount(path) and os.access(path, os.W_OK)), None
)
if mounted is not None:
    storage.check_storage("juicefs", {"mount_point": mounted})
    os.environ[storage.FILE_VARIABLE] = "/elsewhere"
    refused(lambda: storage.check_storage("juicefs", {"mount_point": mounted}), "unset it")
    del os.environ[storage.FILE_VARIABLE]

# A tier that stores something else is found out at start.
kept = TorchMover.backup


def wrong(self, host_slots, device_slots):
    kept(self, host_slots, device_slots)
    self._pages.rows(1, 1)[-1, 0, 0] ^= 1


TorchMover.backup = wrong
refused(lambda: host_pool(packed_pool), "self-test", "values of layer 2")
TorchMover.backup = kept
sys.stdout.write("done\n")
