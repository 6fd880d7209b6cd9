"""What the machine could do at most, and what is taken of it."""

import ctypes
import subprocess
import sys

import pytest
import torch

from bert_core.train.hardware import peak_flops, peak_flops_of, peak_memory_bytes


@pytest.mark.drill
def test_memory_is_the_most_that_was_held_and_not_what_is_held_now() -> None:
    code = (
        "from bert_core.train.hardware import peak_memory_bytes\n"
        "before = peak_memory_bytes(); held = bytearray(200_000_000)\n"
        "for place in range(0, len(held), 4096): held[place] = 1\n"
        "del held; print(peak_memory_bytes() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert 190e6 < int(done.stdout) < 230e6
    assert peak_memory_bytes(torch.device("cpu")) > 50e6


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_memory_that_is_freed_is_kept_where_that_is_asked_for() -> None:
    code = (
        "import os, sys\n"
        "from bert_core.train.hardware import keep_freed_memory\n"
        "if sys.argv[1] == 'keep': keep_freed_memory()\n"
        "page, statm = os.sysconf('SC_PAGESIZE'), '/proc/self/statm'\n"
        "def held(): return page * int(open(statm).read().split()[1])\n"
        "before = held(); block = b'1' * 100_000_000; del block; print(held() - before)"
    )
    kept, given_back = (
        int(subprocess.check_output([sys.executable, "-c", code, how]))
        for how in ("keep", "give back")
    )
    assert given_back < 10e6 < 90e6 < kept


@pytest.mark.drill
def test_a_cpu_computes_deterministically_and_fills_no_memory_for_it() -> None:
    code = (
        "import torch\n"
        "from bert_core.train.hardware import make_deterministic\n"
        "make_deterministic(torch.device('cpu'))\n"
        "print(torch.get_deterministic_debug_mode(), torch.empty(100_000).isnan().all().item())"
    )
    assert subprocess.check_output([sys.executable, "-c", code]).split() == [b"2", b"False"]


@pytest.mark.drill
def test_numbers_that_a_cpu_is_slow_with_are_0_on_every_core_where_that_is_asked_for() -> None:
    code = (
        "import sys, torch\n"
        "from bert_core.train.hardware import flush_denormals\n"
        "torch.set_num_threads(2)\n"
        "if sys.argv[1] == 'flush': flush_denormals()\n"
        "print(torch.full((1_000_000,), 1e-40).mul_(0.9).count_nonzero().item())"
    )
    flushed, kept = (
        int(subprocess.check_output([sys.executable, "-c", code, how])) for how in ("flush", "keep")
    )
    assert (flushed, kept) == (0, 1_000_000)


def test_a_cpu_has_no_peak_to_compare_with() -> None:
    assert peak_flops(torch.device("cpu")) is None


def test_a_chip_is_recognised_by_whole_words_of_its_name() -> None:
    assert peak_flops_of("NVIDIA H200") == peak_flops_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_of("NVIDIA H100 PCIe") == 756e12
    assert peak_flops_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops_of("NVIDIA L40") is None
    assert peak_flops_of("NVIDIA T400 4GB") is None
