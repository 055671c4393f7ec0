"""Targets as TVM takes them."""

import pytest
import tvm

from attentune.errors import InvalidTarget
from attentune.target import Target, describe_cpu

FLAGS = (
    "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe "
    "avx512f avx512bw avx512cd avx512dq avx512vl avx_vnni avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_bf16 amx_int8 amx_fp16"
)


@pytest.mark.parametrize(
    "target",
    [
        "native",
        "llvm",
        "cuda:sm_80",
        "cuda:sm_90a",
        "aws/cpu/c5.large",
        "raspberry-pi/4b-aarch64",
        "nvidia/nvidia-a100",
        {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 3},
        describe_cpu("Linux", "x86_64", f"flags: {FLAGS}", 4),
        describe_cpu("Linux", "aarch64", "Features: asimdhp asimddp bf16 sve", 4),
        describe_cpu("Darwin", "arm64", "", 8),
        describe_cpu("Linux", "riscv64", "", 8),
    ],
    ids=str,
)
def test_tvm_takes_it(target):
    ours = Target.parse(target)
    theirs = ours.to_tvm()
    assert isinstance(theirs, tvm.target.Target)
    assert theirs.kind.name == ours.kind
    assert (theirs.host is not None) == (ours.kind == "cuda")
    assert Target.parse(str(ours)) == ours
    assert Target.parse(str(ours)).to_tvm() is theirs


def test_tag_keeps_what_was_chosen_and_not_what_follows_from_it():
    assert Target.parse("raspberry-pi/4b-aarch64").attributes == {
        "kind": "llvm",
        "mtriple": "aarch64-linux-gnu",
        "mcpu": "cortex-a72",
        "mattr": ["+neon"],
        "num-cores": 4,
    }


# LLVM only warns of a name that it does not know, and generates other code.
@pytest.mark.parametrize(
    ("machine", "cpuinfo"),
    [("x86_64", f"flags: {FLAGS}"), ("aarch64", "Features: asimdhp asimddp bf16 sve")],
)
def test_llvm_knows_every_feature(machine, cpuinfo):
    from tvm.target import codegen

    target = describe_cpu("Linux", machine, cpuinfo, 1)
    theirs = target.to_tvm()
    assert target.attributes["mcpu"] in codegen.llvm_get_cpu_archlist(theirs)
    known = set(codegen.llvm_get_cpu_features(theirs))
    assert {name.removeprefix("+") for name in target.attributes["mattr"]} <= known


# What a level is said to include is what LLVM's processor of that name has.
@pytest.mark.parametrize(
    "cpu",
    ["x86-64-v2", "x86-64-v3", "x86-64-v4", "haswell", "znver3", "skylake-avx512", "cascadelake",
     "icelake-server", "sapphirerapids", "emeraldrapids", "graniterapids", "znver4", "znver5"],
)  # fmt: skip
def test_llvm_agrees_on_what_a_cpu_has(cpu):
    from tvm.target import codegen

    target = Target.parse({"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": cpu})
    assert target.features <= set(codegen.llvm_get_cpu_features(target.to_tvm()))


@pytest.mark.parametrize(
    ("tag", "hint"),
    [
        ("natve", "did you mean 'native'?"),
        ("", "use native, cuda:sm_80, cuda:sm_90, or JSON."),
        ("llvm -mcpu=skylake", "use native, cuda:sm_80, cuda:sm_90, or JSON."),
    ],
)
def test_message_of_an_unknown_tag(tag, hint):
    with pytest.raises(InvalidTarget) as caught:
        Target.parse(tag)
    assert str(caught.value) == f"There is no target {tag!r}; {hint}"


def test_message_of_a_tag_of_another_kind():
    with pytest.raises(InvalidTarget, match="The target's kind is 'opencl'; kernels are made for"):
        Target.parse("opencl")


def test_message_of_an_option_that_tvm_does_not_know():
    with pytest.raises(InvalidTarget) as caught:
        Target.parse({"kind": "llvm", "mcpuu": "x"}).to_tvm()
    assert str(caught.value).startswith(
        'TVM does not accept the target {"kind":"llvm","mcpuu":"x"}: Unknown config option'
    )
