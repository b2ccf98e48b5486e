"""All models of the zoo, in several processes, as far as they are not done yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from zlib import crc32

from normkit.zoo import members
from normkit.zoo.members import Member
from normkit.zoo.pool import Broken, work
from normkit.zoo.records import Records, source_digest, versions
from normkit.zoo.report import Report, Task
from normkit.zoo.trial import attempt

SAMPLE = 60
DESCRIBING = 60.0  # seconds for one model to be built on the meta device
TRYING = 600.0  # seconds for one model to be tried

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What a sweep is to do."""

    targets: tuple[str, ...]
    sample: int | None = None
    """So many models of timm are run, and none tried on the meta device; None: all, and 60 run."""
    only: tuple[str, ...] = ()
    """Patterns that a reference must match one of; empty: all models."""
    in_turn: bool = False
    """Each model gets one of the targets, not all of them."""
    jobs: int = 2


class Sweep:
    """A request, and what is known about it already."""

    def __init__(self, request: Request, records: Records) -> None:
        self.request, self.records = request, records
        libraries = " ".join(f"{name} {version}" for name, version in versions().items())
        self._about_members = libraries
        targets = f"{','.join(request.targets)}{' in turn' * request.in_turn}"
        self._about_trials = f"{libraries} normkit {source_digest()} {targets}"

    def listing(self) -> list[str]:
        """The references of timm, of which those with batch norm will be tried."""
        found = [reference for reference in members.timm_references() if self._wanted(reference)]
        return found if self.request.sample is None else members.few_of_each_family(found)

    def describe(self, tick: Tick) -> tuple[list[Member], dict[str, Report]]:
        """Every model of timm that has batch norms; and those that could not be built."""
        known = self.records.read(self._about_members)
        listed = self.listing()
        for reference in listed:
            if reference in known:
                tick(reference)
        missing = [reference for reference in listed if reference not in known]
        failed: dict[str, Report] = {}
        for reference, member in work(members.describe, missing, self.request.jobs, DESCRIBING):
            tick(reference)
            if isinstance(member, Broken):
                failed[f"meta {reference}"] = Report(failures=[member.reason])
            else:
                facts = asdict(member)
                self.records.add(self._about_members, facts.pop("reference"), facts)
                known[reference] = facts
        found = [Member(name, **known[name]) for name in listed if name in known]
        return [member for member in found if member.batch_norms], failed

    def tasks(self, found: list[Member]) -> list[Task]:
        """What has to be tried, the smallest model first."""
        request = self.request
        sample = SAMPLE if request.sample is None else request.sample
        few = set(members.few_of_each_family(self.listing()))
        candidates = [member for member in found if member.reference in few]
        chosen = {member.reference for member in members.choose(candidates, sample)}
        by_size = sorted(found, key=lambda member: (member.parameters, member.reference))
        tried = [] if request.sample is not None else [m.reference for m in by_size]
        run = [m.reference for m in by_size if m.reference in chosen]
        run += [r for r in members.torchvision_references() if self._wanted(r)]
        return [
            *(Task(reference, self._targets(reference), runs=True) for reference in run),
            *(Task(reference, self._targets(reference)) for reference in tried),
        ]

    def _targets(self, reference: str) -> tuple[str, ...]:
        every = self.request.targets
        # by the name, so that a new model in the list does not change what the others get
        return (every[crc32(reference.encode()) % len(every)],) if self.request.in_turn else every

    def done(self, tasks: list[Task]) -> dict[str, Report]:
        """Results of an earlier sweep that hold still. Failures do not: they are tried again."""
        known = self.records.read(self._about_trials)
        kept = {t.name: Report.of(known[t.name]) for t in tasks if t.name in known}
        return {name: report for name, report in kept.items() if report.passed}

    def attempt(self, tasks: list[Task]) -> Iterator[tuple[Task, Report]]:
        """Try models, and write down what comes of each."""
        for task, found in work(attempt, tasks, self.request.jobs, TRYING):
            report = Report(failures=[found.reason]) if isinstance(found, Broken) else found
            self.records.add(self._about_trials, task.name, report.to_dict())
            yield task, report

    def _wanted(self, reference: str) -> bool:
        only = self.request.only
        return not only or any(fnmatchcase(reference, pattern) for pattern in only)
