"""Statistics of several domains: what a layer of its own for each domain would do.

Drawn from the catalog: every layer that takes ``domains``.
"""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit import catalog
from normkit.core import processes
from normkit.errors import NormkitError, NothingToDo, OptionError, ShapeError
from tests.cases import CHANNELS, VARIANTS, noted

POOLED = [n for n in catalog.names("activation") if "domains" in catalog.ENTRIES[n].options()]
WITH_DOMAINS = [n for n in POOLED if not catalog.ENTRIES[n].no_domains]
CASES = [
    (name, options)
    for name in WITH_DOMAINS
    for options in ({}, *VARIANTS.get(name, []))
    if options.get("mode") is None  # of input_norm, without statistics
]
INDEX = torch.tensor([2, 0, 2, 0, 0, 2, 2, 0])


def pair(
    name: str, options: dict[str, object], domains: int = 3
) -> tuple[nn.Module, nn.ModuleList]:
    """A layer with domains, and one without for each."""
    torch.manual_seed(0)
    layer = catalog.make(name, CHANNELS, dtype=torch.float64, domains=domains, **options)
    singles = nn.ModuleList()
    for domain in range(domains):
        single = catalog.make(name, CHANNELS, dtype=torch.float64, **options)
        single.load_state_dict(rows(layer, domain), strict=False)
        singles.append(single)
    return layer, singles


def rows(layer: nn.Module, domain: int) -> dict[str, Tensor]:
    return {
        **layer.state_dict(),
        **{k: b for k, b in layer.kept(domain=domain).items() if b is not None},
    }


def batch(shift: Tensor) -> Tensor:
    return torch.randn(len(shift), CHANNELS, 4, 4, dtype=torch.float64) + shift[:, None, None, None]


def test_mixed_batches_are_those_of_a_layer_for_each_domain() -> None:
    """In training, backward, running statistics and eval mode, whatever the options."""
    for name, options in CASES:
        with noted((name, options)):
            layer, singles = pair(name, options)
            for _ in range(1 if options else 2):
                x = batch(INDEX)
                mine, theirs = (x.clone().requires_grad_() for _ in range(2))
                with nk.use_domain(layer, INDEX):
                    y = layer(mine)
                expected = torch.zeros_like(y)
                for domain in (0, 2):
                    chosen = (domain == INDEX).nonzero()[:, 0]
                    expected = expected.index_put((chosen,), singles[domain](theirs[chosen]))
                weight = torch.randn_like(y)
                (y * weight).sum().backward()
                (expected * weight).sum().backward()
                torch.testing.assert_close(y, expected)
                torch.testing.assert_close(mine.grad, theirs.grad)
                with nk.use_domain(layer, 1):  # a whole batch of the third
                    torch.testing.assert_close(layer(x), singles[1](x))
            for domain, single in enumerate(singles):
                kept = layer.kept(domain=domain)
                for key, buffer in single.named_buffers():
                    if layer.has_rows(key):
                        torch.testing.assert_close(kept[key], buffer)
            layer.eval(), singles.eval()
            x = batch(INDEX)
            with nk.use_domain(layer, INDEX), torch.no_grad():
                y = layer(x)
            for domain in (0, 2):
                torch.testing.assert_close(y[domain == INDEX], singles[domain](x[domain == INDEX]))


def test_gradients_of_parameters_are_those_of_all_domains() -> None:
    layer = nk.BN(CHANNELS, dtype=torch.float64, domains=3)
    x, bn = batch(INDEX), nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
    with nk.use_domain(layer, INDEX.tolist()):
        layer(x).square().sum().backward()
    sum(bn(x[d == INDEX]).square().sum() for d in (0, 2)).backward()
    torch.testing.assert_close(layer.weight.grad, bn.weight.grad)
    torch.testing.assert_close(layer.bias.grad, bn.bias.grad)


def test_a_domain_that_is_not_in_the_batch_stays_as_it_was() -> None:
    layer = nk.BN(CHANNELS, domains=3)
    with nk.use_domain(layer, INDEX):
        layer(batch(INDEX).float())
    assert layer.num_batches_tracked.tolist() == [1, 0, 1]
    assert not layer.running_mean[1].any()
    assert layer.running_mean[2].mean() > layer.running_mean[0].mean() + 0.1


def test_a_batch_that_is_not_finite_spoils_its_own_domain_only() -> None:
    layer = nk.BN(CHANNELS, domains=3)
    x = batch(INDEX).float()
    x[1] = float("nan")  # of domain 0
    with nk.use_domain(layer, INDEX), pytest.warns(nk.NonFiniteWarning):
        layer(x)
    assert layer.num_batches_tracked.tolist() == [0, 0, 1]
    assert int(layer.nonfinite_batches) == 1
    assert torch.isfinite(layer.running_mean).all()


def test_files_and_copies_hold_all_domains() -> None:
    layer = nk.BN(CHANNELS, domains=3)
    with nk.use_domain(layer, INDEX):
        layer(batch(INDEX).float())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = nk.BN(CHANNELS, domains=3)
    other.load_state_dict(torch.load(file))
    for one in (other, copy.deepcopy(layer)):
        assert torch.equal(one.running_mean, layer.running_mean)
        assert torch.equal(one.num_batches_tracked, layer.num_batches_tracked)


def test_checkpointing_repeats_a_forward_in_the_domain_that_it_was_in() -> None:
    """The backward comes when another domain is in use, or none of both."""
    for name, reentrant in (("bn", False), ("ubn", True)):
        grads, counts = [], []
        for repeated in (False, True):
            torch.manual_seed(3)
            layer = catalog.make(name, CHANNELS, domains=2)
            torch.manual_seed(4)
            x = torch.randn(6, CHANNELS, 4, 4, requires_grad=True)
            outputs = []
            for domain in (0, 1, [0, 1, 0, 1, 0, 1]):
                with nk.use_domain(layer, domain):
                    outputs.append(
                        checkpoint(layer, 2 * x, use_reentrant=reentrant)
                        if repeated
                        else layer(2 * x)
                    )
            sum((y**3).sum() for y in outputs).backward()
            grads.append(x.grad)
            counts.append(layer.num_batches_tracked.tolist())
        torch.testing.assert_close(*grads)
        assert counts[0] == counts[1] == [2, 2]


def test_a_compiled_layer_follows_the_domain() -> None:
    layer = nk.BN(CHANNELS, domains=2)
    compiled = torch.compile(layer, backend="eager")
    other = copy.deepcopy(layer)
    for domain in (1, [0, 1, 0, 1]):
        x = torch.randn(4, CHANNELS, 3, 3)
        with nk.use_domain(layer, domain), nk.use_domain(other, domain):
            torch.testing.assert_close(compiled(x), other(x))
    torch.testing.assert_close(layer.running_mean, other.running_mean)
    assert layer.num_batches_tracked.tolist() == [1, 2]


def test_the_domain_from_before_comes_back() -> None:
    model = nn.Sequential(nk.BN(4, domains=3), nk.GN(4), nk.BN(4))
    nk.use_domain(model, 2)
    with nk.use_domain(model, 1):
        assert model[0].domain == 1
    assert model[0].domain == 2


@pytest.mark.parametrize(
    ("domain", "error", "message"),
    [
        (3, OptionError, r"has 3 domains, 0 to 2, got 3\."),
        (-1, OptionError, "got -1"),
        ([0, 5], OptionError, "got 5"),
        ([], OptionError, r"one for each sample, got a table of shape \(0,\)"),
        ([[0, 1]], OptionError, r"shape \(1, 2\)"),
        ([0.5, 1.0], OptionError, "whole numbers, got torch.float32"),
        (True, OptionError, "whole number, got True"),
        ("a", OptionError, r"a domain, such as 0, or one for each sample, .* got 'a'\."),
        (None, OptionError, r"a domain, such as 0, or one for each sample, .* got None\."),
        ([0, None], OptionError, r"got \[0, None\]\."),
    ],
)
def test_a_domain_that_cannot_be(domain: object, error: type[Exception], message: str) -> None:
    layer = nk.BN(4, domains=3)
    with pytest.raises(error, match=message):
        nk.use_domain(layer, domain)  # type: ignore[arg-type]
    assert layer.domain == 0


def test_eval_mode_refuses_a_domain_that_was_never_seen() -> None:
    layer = nk.BN(4, domains=2).eval()
    x = torch.randn(6, 4, 3, 3)
    with nk.use_domain(layer, 1):
        layer(x)  # a new layer, like every other
        layer.load_state_dict(nk.BN(4, domains=2).state_dict())
    layer.train()(x)
    layer.eval()(x)
    for unseen in (1, [0, 0, 0, 0, 0, 1]):
        with nk.use_domain(layer, unseen), pytest.raises(OptionError, match="never seen domain 1"):
            layer(x)
    with nk.use_domain(layer, 1):
        layer.train()(x)
        layer.eval()(x)


def test_what_has_no_domains_says_so() -> None:
    with pytest.raises(NothingToDo, match="no layer with domains"):
        nk.use_domain(nn.Sequential(nk.BN(4)), 0)
    layer = nk.BN(4, domains=2)
    with nk.use_domain(layer, [0, 1, 1]), pytest.raises(ShapeError, match=r"4 samples, .* of 3"):
        layer(torch.randn(4, 4, 3, 3))
    for wrong in (1, 0, 2.0, True, "two"):
        with pytest.raises(OptionError, match="whole number from 2 on"):
            nk.BN(4, domains=wrong)  # type: ignore[arg-type]
    refused = [name for name in POOLED if name not in WITH_DOMAINS]
    for name in refused:
        with pytest.raises(NormkitError, match="cannot have domains: it"):
            catalog.make(name, 8, domains=2)
    assert len(WITH_DOMAINS) > 5 * len(refused)


def test_conversion_copies_the_statistics_to_every_domain_and_back() -> None:
    bn = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), bn)
    model(torch.randn(8, 3, 6, 6) * 3 + 1)
    model.eval()
    x = torch.randn(4, 3, 6, 6)
    before = model(x)
    plan = nk.plan_conversion(model, "bn", domains=2)
    assert plan.apply(x).exact
    layer = model[1]
    assert isinstance(layer, nk.BN)
    assert torch.equal(layer.running_mean[0], bn.running_mean)
    assert torch.equal(layer.running_var[1], bn.running_var)
    assert layer.num_batches_tracked.tolist() == [1, 1]
    with nk.use_domain(model, 1):
        torch.testing.assert_close(model(x), before)
        model.train()(x - 5)  # the domains part
        model.eval()
    # another kind keeps both, a layer without domains the one in use
    other = nk.plan_conversion(model, "rbn", example=x)
    other.apply()
    assert model[1].domains == 2
    torch.testing.assert_close(model[1].running_mean, layer.running_mean)
    with nk.use_domain(model, 1):
        steps = nk.plan_conversion(model, "torch_bn", example=x)
        assert "statistics of the other domains" in steps.steps[0].lost
        steps.apply()
    assert torch.equal(model[1].running_mean, layer.running_mean[1])
    for done in (steps, other):
        done.undo()
    with pytest.warns(UserWarning, match="have been trained since"):
        plan.undo()
    assert model[1] is bn
    assert torch.equal(model(x), before)


def test_a_conversion_stays_in_the_domain_in_use() -> None:
    """New layers were in domain 0 whatever the old ones were in: outputs jumped, and the
    certificate called an exact conversion inexact."""
    x = torch.randn(4, 3, 6, 6)
    for name in ("ubn", "rbn", "batch_renorm", "ghost_bn"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nk.BN(8, domains=3), nk.NormAct(nk.BN(8), "relu"))
        model[2].norm.keep_domains(3)
        for domain in range(3):
            with nk.use_domain(model, domain):
                model(x + 2 * domain)
        model.eval()
        with noted(name):
            olds = model[1], model[2].norm
            nk.use_domain(model, 1)
            before = model(x)
            with nk.use_domain(model, 2):
                inside = model(x)
                plan = nk.plan_conversion(model, name)
                assert plan.apply(x).exact
                assert model[1] is not olds[0]
                torch.testing.assert_close(model(x), inside)
            torch.testing.assert_close(model(x), before)  # the block has ended for them too
            with nk.use_domain(model, 0):
                plan.undo()
                assert (model[1], model[2].norm) == olds
                assert [layer.domain for layer in olds] == [0, 0]
            assert [layer.domain for layer in olds] == [1, 1]
            assert torch.equal(model(x), before)


def test_a_block_gives_no_domain_to_layers_that_lack_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nk.BN(8, domains=3))
    nk.use_domain(model, 2)
    with nk.use_domain(model, 1):
        nk.convert(model, "bn", domains=2, example=torch.randn(2, 3, 6, 6))
    assert (model[1].domains, model[1].domain) == (2, 0)


@pytest.mark.parametrize(("saved", "domains"), [(None, 2), (2, 3), (2, None)])
def test_a_checkpoint_of_other_domains_says_where_it_fits(
    saved: int | None, domains: int | None
) -> None:
    """torch lists the sizes of every buffer and no way out."""
    source, model = (
        nn.Sequential(nk.BN(4, domains=each), nk.BN(4, domains=each)) for each in (saved, domains)
    )
    source(torch.randn(8, 4, 3, 3) + 2)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(source.state_dict())
    has = f"with {saved} domains" if saved else "without domains"
    assert str(caught.value).count(f"is of a model {has}: load it into such a one.") == 1
    assert (f'nk.convert(model, "bn", domains={domains})' in str(caught.value)) == bool(domains)
    if domains:  # which is what it says
        nk.convert(source, "bn", domains=domains, example=torch.randn(2, 4, 3, 3))
        model.load_state_dict(source.state_dict())
        means = model[0].running_mean
        assert means.abs().min() > 0
        assert torch.equal(means, means[:1].expand_as(means))


def test_a_model_is_folded_for_one_domain() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nk.BN(8, domains=2))
    x = torch.randn(4, 3, 6, 6)
    for domain in (0, 1):
        with nk.use_domain(model, domain):
            model.train()(x + 4 * domain)
    model.eval()
    for domain in (0, 1):
        folded = nk.fold(model, x, domain=domain)
        assert isinstance(folded[1], nn.Identity)
        with nk.use_domain(model, domain):
            torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    with nk.use_domain(model, [0, 1, 0, 1]), pytest.raises(NothingToDo, match="for each sample"):
        nk.fold(model, x)


def test_padding_counts_in_no_domain() -> None:
    layer, singles = pair("bn", {})
    x = batch(INDEX)
    mask = torch.rand(len(INDEX), 4, 4) > 0.4
    with nk.use_domain(layer, INDEX):
        y = layer(x, mask=mask)
    for domain in (0, 2):
        chosen = domain == INDEX
        torch.testing.assert_close(y[chosen], singles[domain](x[chosen], mask=mask[chosen]))
        torch.testing.assert_close(layer.running_var[domain], singles[domain].running_var)


def test_the_page_about_domains_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "domains.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    exec("\n".join(blocks), {})


def test_processes_go_through_all_domains_whatever_each_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else those that have no sample of a domain would not come to the all-reduce of the others."""
    reduced = []

    def all_reduce(table: Tensor, name: str) -> Tensor:
        reduced.append(name)
        return table  # the other process has nothing

    monkeypatch.setattr(processes, "_all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name in ("bn", "rbn", "ubn", "bgn"):
        layer, singles = pair(name, {})
        layer.synchronise(processes.Processes("both", 2, 0))
        x = batch(INDEX)
        reduced.clear()
        with nk.use_domain(layer, INDEX):
            y = layer(x)
        assert len(reduced) >= 3  # of the second domain as well, which is not here
        for domain in (0, 2):
            chosen = domain == INDEX
            torch.testing.assert_close(y[chosen], singles[domain](x[chosen]))
        assert layer.num_batches_tracked.tolist() == [1, 0, 1]


@pytest.mark.parametrize("size", [(), (3, 3)])
@pytest.mark.parametrize("name", ["bn", "rbn", "batch_renorm"])
def test_processes_in_different_domains_do_not_mix_them(
    name: str, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With use_domain(0) here and use_domain(1) there, both got the statistics of the two."""
    torch.manual_seed(0)
    x, there = (torch.randn(4, 4, *size) + 5 * k for k in (0, 1))
    layers = [nk.make(name, 4, domains=2) for _ in range(3)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    sent: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "_all_reduce", lambda t, _: sent.append(t) or t)
    for layer in layers[:2]:
        layer.synchronise(processes.Processes("both", 2, 0))
    with nk.use_domain(layers[0], torch.tensor([1] * 4)):  # an index there, a number here
        layers[0](there)
    others, count = iter(sent.copy()), len(sent)
    sent.clear()

    def all_reduce(table: Tensor, name: str) -> Tensor:
        sent.append(table)
        return table + next(others)

    monkeypatch.setattr(processes, "_all_reduce", all_reduce)
    with nk.use_domain(layers[1], 0):
        y = layers[1](x)
    assert len(sent) == count  # both come to the same all-reduces
    with nk.use_domain(layers[2], torch.tensor([0] * 4 + [1] * 4)):
        torch.testing.assert_close(y, layers[2](torch.cat([x, there]))[:4])
    torch.testing.assert_close(layers[1].running_mean, layers[2].running_mean)
    assert layers[1].num_batches_tracked.tolist() == [1, 1]


def test_micro_batches_share_the_statistics_of_a_domain() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nk.BN(4, domains=2))
    whole = copy.deepcopy(model)
    x = torch.randn(8, 3, 6, 6)
    with nk.use_domain(model, 1), nk.use_domain(whole, 1), nk.accumulate(model) as step:
        step(list(x.split(4)), lambda model, part: model(part).square().mean())
        whole(x)
    torch.testing.assert_close(model[1].running_mean, whole[1].running_mean)
    assert model[1].num_batches_tracked.tolist() == [0, 1]
    refused = pytest.raises(OptionError, match="one domain after the other")
    with nk.use_domain(model, [0, 1] * 4), nk.accumulate(model) as step, refused:
        step(list(x.split(4)), lambda model, part: model(part).square().mean())
