"""Is a collapse of the method or of the layers? Plain torch beside them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tools.evidence import collapse
from tools.evidence.claims import ALL


def test_plain_torch_is_the_same_network():
    model = collapse.by_layers("l-resnet18", "bcn + ws", 3)
    twin = collapse.by_torch(model)
    assert not any(type(m).__module__.startswith("normkit.layers") for m in twin.modules())
    x = torch.randn(4, 3, 32, 32)
    y, other = model.train()(x), twin.train()(x)
    torch.testing.assert_close(other, y, rtol=1e-3, atol=1e-4)
    y.square().sum().backward()
    other.square().sum().backward()
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    theirs = next(m for m in twin.modules() if isinstance(m, collapse.StandardizedConv))
    found, wanted = theirs.v.grad, first.parametrizations["weight"].original.grad
    assert (found - wanted).norm() < 1e-2 * wanted.norm()


def test_results_are_kept_once(tmp_path, monkeypatch, capsys):
    def batches(seed, size, device):
        draw = torch.Generator().manual_seed(seed)
        images = 0.05 * torch.randn(2, 3, 32, 32, generator=draw)
        while True:
            yield images, torch.tensor([0, 1])

    monkeypatch.setattr(collapse, "batches", batches)
    monkeypatch.setattr(collapse, "by_layers", lambda file, variant, seed: _linear(seed))
    path = tmp_path / "collapse.json"
    given = ["--of", "j-xbn-positions", "--steps", "20", "--warmup", "0", "30"]
    given += ["--results", str(path)]
    for _ in range(2):
        assert collapse.main(given) == 0
    kept = json.loads(path.read_text())
    assert kept == collapse.rows(path)
    assert [(row["variant"], row["warmup"], row["by"]) for row in kept] == [
        (variant, warmup, by)
        for variant in ("bn", "xbn, second")
        for warmup in (0, 30)
        for by in ("layers", "torch")
    ]
    for row in kept:
        assert len(row["losses"]) == 2
        assert row["losses"][1] < row["losses"][0]
        assert row["environment"]["torch"] == torch.__version__
        assert row["environment"]["device"]
        assert row["seconds"] >= 0
    assert kept[0]["losses"] == kept[1]["losses"]  # nothing of it is a layer of normkit
    assert "step 20: " in capsys.readouterr().out
    before = path.read_bytes()
    for few in ("0", "9", "-10", "many"):  # rows were replaced by empty lists
        with pytest.raises(SystemExit):
            collapse.main(["--of", "j-xbn-positions", "--results", str(path), "--steps", few])
        assert f"got {few}, expected 10 or more" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_float32_is_not_rounded_to_tf32(monkeypatch):
    flags = torch._C  # past torch.backends, whose flags another test may have frozen
    now = lambda: (flags._get_cublas_allow_tf32(), flags._get_cudnn_allow_tf32())  # noqa: E731
    before, seen = now(), []
    flags._set_cublas_allow_tf32(True)
    flags._set_cudnn_allow_tf32(True)

    def losses(*_):
        seen.append(now())
        return [1.0]

    monkeypatch.setattr(collapse, "losses", losses)
    monkeypatch.setattr(collapse, "by_layers", lambda file, variant, seed: _linear(seed))
    monkeypatch.setattr(collapse, "keep", lambda *_: None)
    try:
        assert collapse.main(["--of", "l-resnet18", "--by", "torch"]) == 0
        after = now()
    finally:
        flags._set_cublas_allow_tf32(before[0])
        flags._set_cudnn_allow_tf32(before[1])
    assert seen == [(False, False)]
    assert after == (True, True)


def _linear(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2))


def test_the_page_has_the_first_steps(tmp_path, monkeypatch):
    pytest.importorskip("scipy", reason="scipy is not installed")
    from tools.evidence import asides

    row = {"of": "j-xbn-positions", "variant": "bn", "seed": 1, "by": "torch", "warmup": 391}
    monkeypatch.setattr(asides, "collapse_rows", lambda: [{**row, "losses": [2.5, 1.25]}])
    claim, other = (
        next(c for c in ALL if c.file == file and c.first_steps)
        for file in ("j-xbn-positions", "l-resnet18")
    )
    told = "\n".join(asides.first_steps(claim))
    assert "| bn | 391 steps | 1 | plain torch | 2.50 | 1.25 |" in told
    assert "Device and seconds were not recorded; none of it is in the total above." in told
    new = {**row, "losses": [2.0], "seconds": 7.0, "environment": {"device": "X", "torch": "9"}}
    monkeypatch.setattr(asides, "collapse_rows", lambda: [{**row, "losses": [2.5, 1.25]}, new])
    told = "\n".join(asides.first_steps(claim))
    assert "7 s on X, torch 9; device and seconds of 1 rows were not recorded; none of" in told
    assert "| plain torch | 2.00 | – |" in told
    assert list(asides.first_steps(other)) == []
