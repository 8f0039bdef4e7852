"""How much the CPU attends to, and that what it computes beside a device is the same."""

from __future__ import annotations

import pytest
import torch

from kvtier.attention import Kernel, merge, partial_attention
from kvtier.host_attention import HostAttender, HostShare
from kvtier.types import HostAttention

CPU = torch.device("cpu")


class Link:
    """Slices a second that cross it."""

    per_s: float | None = None

    def __call__(self) -> float | None:
        return self.per_s


def auto() -> tuple[HostShare, Link]:
    link = Link()
    return HostShare(HostAttention.AUTO, is_on_host=False, link_per_s=link), link


@pytest.mark.parametrize(("mode", "frac"), [(HostAttention.NEVER, 0.0), (HostAttention.ALWAYS, 1.0)])
@pytest.mark.parametrize("is_on_host", [False, True])
def test_never_and_always_ask_nobody(mode: HostAttention, frac: float, is_on_host: bool) -> None:
    share = HostShare(mode, is_on_host=is_on_host, link_per_s=lambda: 1000.0)
    share.host.add(10.0, 1.0)
    assert share.frac() == frac


def test_a_model_on_the_cpu_reads_the_cpu_tier_where_it_lies() -> None:
    assert HostShare(HostAttention.AUTO, is_on_host=True).frac() == 1.0


def test_auto_makes_both_end_at_the_same_time() -> None:
    share, link = auto()
    assert share.frac() == 0.5  # both are tried first
    share.host.add(300.0, 1.0)
    assert share.frac() == 0.5
    link.per_s = 100.0
    assert share.frac() == 0.75
    num_blocks = 100
    assert share.frac() * num_blocks / 300 == pytest.approx((1 - share.frac()) * num_blocks / 100)


def test_auto_changes_its_mind_in_steps_so_that_plans_last() -> None:
    share, link = auto()
    share.host.add(100.0, 1.0)
    link.per_s = 104.0
    assert share.frac() == 0.5
    link.per_s = 1552.0
    assert share.frac() == 1 / 16
    link.per_s = 1e9
    assert share.frac() == 0.0


def test_a_link_that_is_far_slower_is_not_used() -> None:
    share, link = auto()
    share.host.add(1e9, 1.0)
    link.per_s = 1.0
    assert share.frac() == 1.0


def test_attention_beside_a_device_is_that_of_one_call() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 2, 6, 16), torch.randn(5, 2, 8, 16), torch.randn(5, 2, 8, 16)
    kernel, share = Kernel(0.25), HostShare(HostAttention.ALWAYS, is_on_host=False)
    attender = HostAttender(CPU, share)
    pieces = [(keys[:2], values[:2]), (keys[2:3], values[2:3]), (keys[3:], values[3:])]
    part = attender.finish(attender.start(query, pieces, kernel))
    whole = merge([partial_attention(query, keys, values, kernel)])
    assert torch.allclose(part.output, whole.output, atol=1e-6) and torch.allclose(part.lse, whole.lse, atol=1e-6)
    assert share.host.per_s is not None
    attender.close()
    attender.close()


def test_what_fails_beside_the_device_is_raised_by_who_asks_for_it() -> None:
    share = HostShare(HostAttention.ALWAYS, is_on_host=False)
    attender = HostAttender(CPU, share)
    bad = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    begun = attender.start(torch.randn(1, 2, 6, 12), [bad], Kernel(0.25))
    with pytest.raises(RuntimeError):
        attender.finish(begun)
    attender.close()
