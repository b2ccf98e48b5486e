"""A conversion before, while and after it is done: what it says and what it does."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.conversion.certificate import (
    NO_NUMBERS,
    Before,
    Certificate,
    certify,
    forget,
    measure_before,
    remember,
)
from normkit.conversion.edits import (
    Edit,
    ReplaceModule,
    check_all,
    copies,
    do_all,
    refuse_unchangeable,
    replacements,
    same,
    undo_all,
)
from normkit.conversion.fit.report import FitReport
from normkit.conversion.forward_probe import Probe
from normkit.conversion.optimizer import Rewiring, optimizers_of
from normkit.conversion.sources import norm_of
from normkit.core.trained import STATISTICS
from normkit.errors import NothingToDo

Action = Literal["convert", "skip", "keep"]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
SHOWN = ("activation ", "drop layer ")  # the change shows them on both sides
WIDTH = 120  # of what is not a column
INDENT = "    "


@dataclass(frozen=True)
class Step:
    """One line of a plan: a norm, what becomes of it, and what that costs."""

    path: str
    """Where it is in the model: the first path, if it has several."""
    was: str
    """The module that is there."""
    becomes: str = ""
    """The module that will be; empty where nothing changes."""
    action: Action = "convert"
    """"convert"; "keep", since it is what was asked for already, or was not asked for; or "skip",
    since it cannot be converted: see the reason."""
    carried: tuple[str, ...] = ()
    """What the new module takes over."""
    initialised: tuple[str, ...] = ()
    """What the new module has beside that, at its start values."""
    lost: tuple[str, ...] = ()
    """What the old module knew and the new one has no place for."""
    fitted: tuple[str, ...] = ()
    """What is fitted on images, so that the new module gives what the old one gave."""
    exact: bool = False
    """Whether the new module equals the old one in eval mode."""
    reason: str = ""
    """Why it is skipped or kept, or anything else worth knowing."""
    paths: tuple[str, ...] = ()
    """Every path, where the module is shared."""

    @property
    def change(self) -> str:
        """From what to what."""
        return f"{self.was} → {self.becomes}" if self.action == "convert" else self.was

    @property
    def contents(self) -> str:
        """What is carried, what starts anew, what is lost, and whether it is exact, in words."""
        if self.action != "convert":
            return ""
        parts = (
            ("fits", self.fitted),
            ("carries", [what for what in self.carried if not what.startswith(SHOWN)]),
            ("starts", self.initialised),
            ("loses", self.lost),
        )
        phrases = [f"{verb} {', '.join(what)}" for verb, what in parts if what]
        phrases.append("exact in eval mode" if self.exact else "another function in eval mode")
        return "; ".join(phrases)

    @property
    def note(self) -> str:
        """The reason, with the action where that is not to convert."""
        if self.action == "convert":
            return self.reason
        return f"{self.action}: {self.reason}" if self.reason else self.action


class Plan:
    """What a conversion will do to a model: print it, ``apply`` it, ``undo`` it.

    It is made of edits, which are done in their order, and of the steps that tell of them.
    Making a plan changes nothing. ``apply`` changes all or, on an error, nothing, and measures
    what that does to the output. ``undo`` puts the original modules back, with their values.
    """

    def __init__(
        self,
        model: nn.Module,
        edits: Iterable[Edit],
        steps: Iterable[Step],
        *,
        example: Any = None,
        optimizer: Optimizers = None,
        title: str = "conversion",
        notes: Iterable[str] = (),
        fit: FitReport | None = None,
        cautions: Iterable[str] = (),
    ) -> None:
        refuse_unchangeable(model)
        self.model = model
        self.fit = fit
        self.edits = tuple(edits)
        self.steps = tuple(steps)
        self.title = title
        self.notes = tuple(notes)
        self.cautions = tuple(cautions)
        """What ``apply`` warns of, beside what it finds out."""
        self.example = example
        self.certificate: Certificate | None = None
        several: Any = optimizer if isinstance(optimizer, tuple | list) else [optimizer]
        self._rewirings = [Rewiring(each, model) for each in several if each is not None]
        self._contents: list[dict[str, Tensor]] = []
        check_all(model, self.edits)

    # ---------------------------------------------------------------- what it says

    @property
    def applied(self) -> bool:
        """Whether the model is converted now."""
        return self.certificate is not None

    @property
    def exact(self) -> bool:
        """Whether every layer is expected to give the same as before in eval mode."""
        others = any(not isinstance(edit, ReplaceModule) for edit in self.edits)
        return not others and all(step.exact for step in self.steps if step.action == "convert")

    def count(self, action: Action = "convert") -> int:
        """How many steps there are of an action: "convert", "keep" or "skip"."""
        return Counter(step.action for step in self.steps)[action]

    def __str__(self) -> str:
        """A headline, one line a norm, the other edits, and the certificate if there is one."""
        lines = [self._headline()]
        counted = Counter(step.contents for step in self.steps if step.action == "convert")
        usual, times = next(iter(counted.most_common(1)), ("", 0))
        if times > 1:
            others = "" if len(counted) == 1 else ", unless noted below"
            lines += wrap(f"Each layer{others}: {usual}.", WIDTH)
        if self.steps:
            lines += ["", *_rows(self.steps, usual if times > 1 else "")]
        besides = [edit.description for edit in self.edits if not isinstance(edit, ReplaceModule)]
        if besides:
            lines += ["", "Besides:", *(f"  {description}" for description in besides)]
        if self.certificate is not None:
            lines += ["", f"Applied. {self.certificate}"]
        else:
            notes = [] if self.fit is None else [str(self.fit)]
            notes += [*self.notes, *(f"! {text}" for text in self.cautions), *self._untrained()]
            lines += ["", *notes] if notes else []
        return "\n".join(lines)

    def _headline(self) -> str:
        counts = [f"{self.count()} of {len(self.steps)} norms to convert"]
        others = (self.count("keep"), "kept"), (self.count("skip"), "skipped")
        counts += [f"{count} {word}" for count, word in others if count]
        if not self.count():
            return f"{self.title}: {', '.join(counts)}."
        outlook = (
            "Each layer is exact in eval mode."
            if self.exact
            else "The function changes: apply() measures by how much."
        )
        return f"{self.title}: {', '.join(counts)}. {outlook}"

    def __repr__(self) -> str:
        state = "applied" if self.applied else "not applied"
        return f"<Plan: {self.title}, {self.count()} norm(s) to convert, {state}>"

    # ---------------------------------------------------------------- what it does

    def apply(self, example: Any = None) -> Certificate:
        """Change the model, and say what that did to its output in eval mode.

        ``example`` is an input to measure with: a tensor, a tuple of positional arguments or a
        mapping of keyword arguments. Without one an input is looked for; ``example=False`` does
        without measuring. Whatever goes wrong, the model is as it was. A plan that is applied
        already gives its certificate again.
        """
        return self._apply(example, stacklevel=3)

    def _apply(self, example: Any, stacklevel: int) -> Certificate:
        if self.certificate is not None:
            return self.certificate
        if not self.edits and not self.count("keep"):
            message = f"{self.title}: no layer is converted. {self._why_none()}"
            warnings.warn(message, stacklevel=stacklevel)
        refuse_unchangeable(self.model)
        check_all(self.model, self.edits)
        example = self.example if example is None else example
        before: Before | Probe = Probe(None, "nothing was changed")
        if self.edits:
            before = measure_before(self.model, self.edits, example)
        parameters = list(self.model.parameters())
        forgotten = [] if self._rewirings else self._optimizers()
        try:
            do_all(self.model, self.edits)
            self._contents = self._new_contents()
            self._rewire(parameters)
            notes = [*self.notes, *self._without_statistics()]
            notes += [f"{rewiring.note}." for rewiring in self._rewirings] or self._untrained()
            certificate = certify(self.model, self.edits, before, self.title, notes)
            certificate = replace(certificate, fit=self.fit)
            self.certificate = certificate
        except BaseException:
            self._restore()
            raise
        remember(self.model, self.certificate)
        cautions = [*self.cautions, *forgotten, *self._alarms(certificate, before)]
        if cautions:
            warnings.warn(f"{self.title}: {' '.join(cautions)}", stacklevel=stacklevel)
        return self.certificate

    def _alarms(self, certificate: Certificate, before: Before | Probe) -> list[str]:
        """What the certificate says and nobody might read."""
        alarms = []
        if not certificate.finite:
            alarms.append(
                "The output in eval mode is not finite any more. Train or calibrate the model "
                "before eval mode, convert fewer norms, or undo the plan."
            )
        elif self.count() and self.exact and certificate.contradicts_exactness:
            alarms.append(f"Every layer was to be exact, but: {certificate.verdict}")
        if isinstance(before, Probe) and before.text.startswith(NO_NUMBERS):
            alarms.append(certificate.verdict)
        if isinstance(before, Before):
            for edit in replacements(self.edits):
                multiple = getattr(norm_of(edit.new), "batch_multiple", 1)
                samples = before.samples.get(edit.paths[0])
                if multiple > 1 and samples is not None:
                    alarms.append(
                        f"{edit.paths[0]} takes a multiple of {multiple} samples in training, and "
                        f"gets {samples} here, which is not the number of images: it may be any "
                        f'number, as of proposals. Leave it out: where="!{edit.paths[0]}".'
                    )
        return alarms

    def _optimizers(self) -> list[str]:
        """A caution for each optimizer that would go on without the new parameters."""
        if not self._new_parameters():
            return []
        kinds = [type(each).__name__ for each in optimizers_of(self.model)]
        if not kinds:
            return []
        return [
            f"{len(self._new_parameters())} parameter(s) are new, and {' and '.join(kinds)}, made "
            "for this model, will not train them: give it to the conversion with optimizer=, or "
            "make a new one now."
        ]

    def _new_parameters(self) -> list[nn.Parameter]:
        """Those of the new layers that are not in the model before, and are to be trained."""
        old = {id(p) for edit in replacements(self.edits) if edit.old is not None
               for p in edit.old.parameters()}  # fmt: skip
        new = {id(p): p for edit in replacements(self.edits) for p in edit.new.parameters()}
        new |= {id(s.new): s.new for edit in self.edits for s in edit.successors()}
        return [p for p in new.values() if id(p) not in old and p.requires_grad]

    def undo(self) -> None:
        """Put the original modules back, with the values they had; optimizers likewise.

        What was trained elsewhere in the model since then stays as it is, so a warning is given
        if the new layers have changed: then the model is neither what it was nor what it became.
        """
        if self.certificate is None:
            raise NothingToDo("The plan is not applied, so there is nothing to undo.")
        for edit in self.edits:
            edit.check_undo(self.model)
        unchanged = all(
            same(value, after[name].to(value))
            for before, after in zip(self._contents, self._new_contents(), strict=True)
            for name, value in before.items()
        )
        if not unchanged:
            warnings.warn(
                f"{self.title}: the new layers have been trained since. undo brings back the old "
                "ones as they were, while the rest of the model stays as it is.",
                stacklevel=2,
            )
        self._restore()

    def _new_contents(self) -> list[dict[str, Tensor]]:
        return [copies(edit.new) for edit in replacements(self.edits)]

    def _rewire(self, before: list[nn.Parameter]) -> None:
        now = {id(p) for p in self.model.parameters()}
        gone = [p for p in before if id(p) not in now]
        come = [s for edit in self.edits for s in edit.successors() if id(s.new) in now]
        olds = [edit.old for edit in replacements(self.edits) if edit.old is not None]
        stay = {p: None for old in olds for p in old.parameters() if id(p) in now}
        for rewiring in self._rewirings:
            rewiring.do(gone, come, list(stay))

    def _restore(self) -> None:
        for rewiring in self._rewirings:
            rewiring.undo()
        undo_all(self.model, self.edits)
        if self.certificate is not None:
            forget(self.model, self.certificate)
        self.certificate = None

    def _without_statistics(self) -> list[str]:
        empty = [s.path for s in self.steps if STATISTICS in s.initialised]
        if not empty:
            return []
        return [
            f"{len(empty)} layer(s) took over from norms without running statistics, such as "
            f"{empty[0]}: train or calibrate before eval mode, or convert the batch norms alone, "
            'where="kind:bn".'
        ]

    def _untrained(self) -> list[str]:
        """What nobody would train who has an optimizer already."""
        new = self._new_parameters()
        if not new or self._rewirings:
            return []
        return [
            f"{len(new)} parameter(s) are new: make the optimizer now, or give it to the plan with "
            "optimizer=."
        ]

    def _why_none(self) -> str:
        reasons = Counter(step.reason for step in self.steps if step.action == "skip")
        if not reasons:
            return "The model has no norms that normkit knows. Print normkit.survey(model)."
        return " ".join(f"{count} skipped: {reason}." for reason, count in reasons.items())


def _rows(steps: Sequence[Step], usual: str) -> list[str]:
    """One line a norm, and below it what happens to its contents where that is not the usual."""
    cells = [("layer", "change", ""), *((s.path, s.change, s.note) for s in steps)]
    widths = [max(len(row[i]) for row in cells) for i in (0, 1)]
    below = ["", *("" if step.contents == usual else step.contents for step in steps)]
    lines = []
    for (path, change, note), contents in zip(cells, below, strict=True):
        line = f"{path:{widths[0]}}  {change:{widths[1]}}  {note}".rstrip()
        fits = len(line) <= WIDTH
        lines.append(line if fits else f"{path:{widths[0]}}  {change}")
        for text in (contents, "" if fits else note):
            lines += wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return lines
