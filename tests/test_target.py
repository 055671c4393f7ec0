"""Targets without TVM: text, CPUs from what they say of themselves, matrix units, mistakes."""

import json
import platform

import pytest

from attentune import threads
from attentune.errors import InvalidTarget
from attentune.target import Target, describe_cpu, native
from attentune.threads import available_cores

V1 = "fpu sse sse2 fxsr mmx lm syscall"
V2 = f"{V1} cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def x86(flags, system="Linux", cores=4):
    info = f"processor\t: 0\nmodel name\t: a CPU\nflags\t\t: {flags}\nbugs\t\t: none\n"
    return describe_cpu(system, "x86_64", info * 2, cores)


CPUS = {
    "baseline": (x86(V1), "x86-64", [], 16, ()),
    "v2": (x86(V2), "x86-64-v2", [], 16, ()),
    "v3": (x86(V3), "x86-64-v3", [], 32, ()),
    "v3 without fma": (x86(V3.replace(" fma", "")), "x86-64-v2", [], 16, ()),
    "v4": (x86(V4), "x86-64-v4", [], 64, ()),
    "Knights Landing": (x86(f"{V3} avx512f avx512cd"), "x86-64-v3", [], 32, ()),
    "Alder Lake": (x86(f"{V3} avx_vnni"), "x86-64-v3", ["+avxvnni"], 32, ()),
    "Sapphire Rapids": (
        x86(f"{V4} avx_vnni avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8"),
        "x86-64-v4",
        ["+amx-bf16", "+amx-int8", "+amx-tile", "+avx512bf16", "+avx512fp16", "+avx512vnni",
         "+avxvnni"],
        64,
        ("bfloat16",),
    ),
    "Granite Rapids": (
        x86(f"{V4} amx_tile amx_bf16 amx_fp16"),
        "x86-64-v4",
        ["+amx-bf16", "+amx-fp16", "+amx-tile"],
        64,
        ("bfloat16", "float16"),
    ),
    "AMX that the kernel hides": (x86(f"{V4} amx_bf16"), "x86-64-v4", ["+amx-bf16"], 64, ()),
    "Zen 3": (x86(f"{V3} sse4a clzero"), "x86-64-v3", [], 32, ()),
    "Zen 4": (
        x86(f"{V4} sse4a clzero avx512_bf16 avx512_vnni"),
        "x86-64-v4",
        ["+avx512bf16", "+avx512vnni"],
        64,
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CPUS)
def test_x86(name):
    target, level, extras, width, cmma = CPUS[name]
    assert target.attributes == {
        "kind": "llvm",
        "mtriple": "x86_64-unknown-linux-gnu",
        "mcpu": level,
        "num-cores": 4,
        **({"mattr": extras} if extras else {}),
    }
    assert (target.vector_bytes, target.cmma_dtypes) == (width, cmma)
    assert (target.kind, target.arch, target.is_cpu, target.num_cores) == (
        "llvm", "x86_64", True, 4,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("system", "machine", "cpuinfo", "expected"),
    [
        (
            "Linux",
            "aarch64",
            "processor\t: 0\nFeatures\t: fp asimd aes asimdhp asimddp bf16 sve\n",
            {
                "mtriple": "aarch64-unknown-linux-gnu",
                "mcpu": "generic",
                "mattr": ["+bf16", "+dotprod", "+fullfp16", "+neon", "+sve"],
            },
        ),
        (
            "Linux",
            "aarch64",
            "Features\t: fp asimd",
            {"mtriple": "aarch64-unknown-linux-gnu", "mcpu": "generic", "mattr": ["+neon"]},
        ),
        (
            "Darwin",
            "arm64",
            "",
            {"mtriple": "arm64-apple-darwin", "mcpu": "generic", "mattr": ["+neon"]},
        ),
        ("Darwin", "x86_64", "", {"mtriple": "x86_64-apple-darwin", "mcpu": "x86-64"}),
        ("Windows", "AMD64", "", {"mtriple": "x86_64-pc-windows-msvc", "mcpu": "x86-64"}),
        ("Linux", "riscv64", "isa\t: rv64", {"mtriple": "riscv64-unknown-linux-gnu",
                                             "mcpu": "generic"}),
        ("FreeBSD", "amd64", "", {"mtriple": "x86_64-unknown-unknown", "mcpu": "x86-64"}),
    ],
)  # fmt: skip
def test_other_cpus(system, machine, cpuinfo, expected):
    target = describe_cpu(system, machine, cpuinfo, 8)
    assert target.attributes == {"kind": "llvm", "num-cores": 8, **expected}
    assert target.arch == {"arm64": "aarch64", "AMD64": "x86_64", "amd64": "x86_64"}.get(
        machine, machine
    )
    assert ("neon" in target.features) == (target.arch == "aarch64")
    assert (target.vector_bytes, target.cmma_dtypes) == (16, ())


def test_native():
    target = Target.parse("native")
    assert target is Target.parse(" native ")
    assert target is native()
    assert target.num_cores == available_cores() >= 1
    assert target.is_cpu


def test_cores_where_a_process_is_not_bound_to_any(monkeypatch):
    monkeypatch.delattr(threads.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: None)
    assert available_cores() == 1


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("cuda:sm_80", '{"arch":"sm_80","kind":"cuda"}'),
        (" cuda:sm_90a ", '{"arch":"sm_90a","kind":"cuda"}'),
        ('{"kind": "cuda", "arch": "sm_75"}', '{"arch":"sm_75","kind":"cuda"}'),
        ({"kind": "llvm"}, '{"kind":"llvm"}'),
        (
            {"num-cores": 2, "kind": "llvm", "mattr": ("+fma", "+avx2", "+fma")},
            '{"kind":"llvm","mattr":["+avx2","+fma"],"num-cores":2}',
        ),
        ({"kind": "llvm", "mattr": []}, '{"kind":"llvm"}'),
        ({"kind": "llvm", "keys": ["cpu"], "tag": ""}, '{"kind":"llvm"}'),
    ],
)
def test_canonical_form(text, config):
    target = Target.parse(text)
    assert target.config == str(target) == config
    assert Target.parse(str(target)) == target
    assert Target.parse(target) is target
    assert hash(Target.parse(text)) == hash(target)


@pytest.mark.parametrize("target", [entry[0] for entry in CPUS.values()], ids=CPUS)
def test_text_reads_back(target):
    assert Target.parse(str(target)) == target
    assert Target.parse(json.loads(str(target))) == target


@pytest.mark.parametrize(
    ("arch", "dtypes"),
    [
        ("sm_60", ()),
        ("sm_61", ()),
        ("sm_70", ("float16",)),
        ("sm_75", ("float16",)),
        ("sm_80", ("float16", "bfloat16")),
        ("sm_90a", ("float16", "bfloat16")),
        ("sm_100f", ("float16", "bfloat16")),
    ],
)
def test_tensor_cores(arch, dtypes):
    target = Target.parse(f"cuda:{arch}")
    assert (target.arch, target.cmma_dtypes, target.is_cpu) == (arch, dtypes, False)
    assert (target.features, target.num_cores) == (frozenset(), 1)


@pytest.mark.parametrize(
    ("arch", "kilobytes"),
    [("sm_50", 48), ("sm_75", 64), ("sm_80", 163), ("sm_86", 99), ("sm_90a", 227), ("sm_100", 227)],
)
def test_limits_of_a_block_of_threads(arch, kilobytes):
    target = Target.parse(f"cuda:{arch}")
    assert (target.shared_memory_bytes, target.max_threads) == (kilobytes * 1024, 1024)
    less = Target.parse({**target.attributes, "max_shared_memory_per_block": 4096})
    assert less.shared_memory_bytes == 4096


@pytest.mark.parametrize(
    ("config", "width", "cmma"),
    [
        ({"mcpu": "haswell"}, 32, ()),
        ({"mcpu": "skylake-avx512"}, 64, ()),
        ({"mcpu": "sapphirerapids"}, 64, ("bfloat16",)),
        ({"mcpu": "graniterapids"}, 64, ("bfloat16", "float16")),
        ({"mcpu": "znver4"}, 64, ()),
        ({"mcpu": "cortex-a72"}, 16, ()),
        ({"mattr": ["+avx2"]}, 32, ()),
        ({"mattr": ["+avx2", "+avx512f"]}, 32, ()),
        ({"mcpu": "x86-64-v4", "mattr": ["-avx512f"]}, 32, ()),
        ({"mcpu": "sapphirerapids", "mattr": ["-amx-tile"]}, 64, ()),
    ],
)
def test_features_that_a_configuration_implies(config, width, cmma):
    target = Target.parse({"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", **config})
    assert (target.vector_bytes, target.cmma_dtypes) == (width, cmma)


def test_features_are_spelled_as_llvm_does():
    target = Target.parse({"kind": "llvm", "mcpu": "x86-64-v3", "mattr": ["+amx-tile", "-fma"]})
    assert {"sahf", "sse4.1", "sse4.2", "bmi", "lzcnt", "amx-tile", "avx2"} <= target.features
    assert not {"fma", "-fma", "abm", "sse4_1", "bmi1", "lahf_lm"} & target.features


def test_instruction_set_of_a_target_without_a_triple_is_this_machines(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "ARM64")
    assert Target.parse({"kind": "llvm"}).arch == "aarch64"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (5, "The target is 5; pass 'native', 'cuda:sm_80', or a TVM target as JSON."),
        (
            "{kind",
            "The target '{kind' is not JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1).",
        ),
        ("{}", "The target's kind is None; kernels are made for llvm and cuda."),
        (
            {"kind": "opencl"},
            "The target's kind is 'opencl'; kernels are made for llvm and cuda.",
        ),
        *(
            (text, f"The CUDA target's arch is {arch!r}; name one, as in 'cuda:sm_80'.")
            for text, arch in (
                ("cuda", ""),
                ("cuda:", ""),
                ("cuda:80", "80"),
                ("cuda:sm_", "sm_"),
                ("cuda:sm_x", "sm_x"),
                ({"kind": "cuda", "arch": 80}, "80"),
            )
        ),
        *(
            (
                {"kind": "llvm", "mattr": mattr},
                f"The target's mattr is {mattr!r}; it must be a list of names, as in ['+avx2'].",
            )
            for mattr in ("+avx2", [5], None)
        ),
        *(
            (
                {"kind": "llvm", "num-cores": cores},
                f"The target's num-cores is {cores!r}; it must be a whole number of at least 1.",
            )
            for cores in (0, -1, "4", 2.0, True, None)
        ),
        (
            {"kind": "llvm", "mcpu": {1}},
            "The target {'kind': 'llvm', 'mcpu': {1}} holds values that are not JSON.",
        ),
    ],
)
def test_message(text, message):
    with pytest.raises(InvalidTarget) as caught:
        Target.parse(text)
    assert str(caught.value) == message
