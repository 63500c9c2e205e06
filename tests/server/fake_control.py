"""Fake adapters and training: what they were asked, and answers that a test can change."""

import asyncio
import contextlib
from dataclasses import replace

from mlx_parallm.adapters.cards import AdapterCard, AdapterStats, CheckpointCard, KeptPart, Residence
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.trajectories import FeedbackCard, GroupCard
from mlx_parallm.errors import (
    ConflictError,
    InvalidRequestError,
    UnknownModelError,
    UnknownTrajectoryError,
)
from mlx_parallm.extras.averages.service import AverageCard
from mlx_parallm.extras.competition.comparison import ComparisonCard
from mlx_parallm.extras.forgetting.cards import ForgetCard, ForgetPlan
from mlx_parallm.extras.lessons.cards import LessonCard, LessonOutcome, LessonPrompt, LessonRule, LessonSpec, RuleKind
from mlx_parallm.extras.people.service import EditCard, FoundTrajectory, SignalReport
from mlx_parallm.extras.reward_models.cards import RewardModelCard
from mlx_parallm.extras.reward_models.folder import no_reward_model
from mlx_parallm.extras.why.cards import WhyAnswer, WhyVersion
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.reading import GroupReader
from mlx_parallm.rl.sources import SourceLedger, SourceReport
from mlx_parallm.rl.status import TrainingHistory, TrainingStatus, UpdateReport

COMPARISON = ComparisonCard(
    "policy", AdapterRef("policy", 2), AdapterRef("policy", 1), False, 0.2, 1_800_000_000.0, live_mean=0.25
)


class Working:
    """`error`: what the next awaited call raises. `hold`: awaited calls wait for `go_on`, having set `held`."""

    def __init__(self):
        self.error = None
        self.hold = False
        self.held = asyncio.Event()
        self.go_on = asyncio.Event()

    async def work(self):
        self.held.set()
        if self.hold:
            await self.go_on.wait()
        if self.error:
            raise self.error


class Asked:
    """`asked`: what it was asked. `error`: what it raises then."""

    def __init__(self):
        self.asked = []
        self.error = None

    def note(self, asked):
        self.asked.append(asked)
        if self.error:
            raise self.error


class FakeAdapters(Working):
    """Versions without weights: every `load` and `publish` is a new one, which its name then means.

    `asked`: every selector that a lease or a lookup was asked for; `keys`: the keys of the leases. `folders`: every
    path of `load_folder`. `bases`: the base models of all loads and unloads. `default`: the result of `default_name`.
    `leased`: how many leases are held.
    """

    def __init__(self):
        super().__init__()
        self.known = {}
        self.shares = {"base": 1.0}
        self.before = []
        self.saved = []
        self.asked = []
        self.keys = []
        self.folders = []
        self.bases = []
        self.default = None
        self.leased = 0
        self.state = AdapterStats(slots=4)

    def publish(self, name):
        version = max((ref.version for ref in self.known if ref.name == name), default=0) + 1
        ref = AdapterRef(name, version)
        self.known[ref] = AdapterCard(ref, True, Residence.SLOT, "", 8, 16.0, ("q_proj",), 64, 1_800_000_000)
        self._revive(ref)
        return ref

    def lease(self, selector, key=None):
        self.keys.append(key)
        return self._leased(self._ref(max(self.shares, key=self.shares.get) if selector is None else selector))

    def find(self, selector):
        ref = self._ref(selector)
        if ref == BASE_ADAPTER:
            raise UnknownModelError("base is no adapter")
        return self.known[ref]

    def cards(self):
        return tuple(self.known[ref] for ref in sorted(self.known, key=str))

    async def load(self, name, path, replace, base=None):
        await self.work()
        self.bases.append(base)
        if not replace and any(ref.name == name for ref in self.known):
            raise InvalidRequestError(f"the name {name!r} is taken; send load_inplace: true to replace it")
        return self.known[self.publish(name)]

    async def folder_of(self, path):
        return path

    async def delete(self, name, dry_run):
        await self.work()
        gone = [ref for ref in self.known if ref.name == name]
        if not gone:
            raise UnknownModelError(f"no adapter {name!r}")
        if not dry_run:
            self.known = {ref: card for ref, card in self.known.items() if ref not in gone}
        return (KeptPart("versions that are loaded", "", len(gone)), KeptPart("files", f"/run/{name}", 3, 64))

    async def load_folder(self, path):
        await self.work()
        if path not in self.folders:
            self.publish("in-folder")
        self.folders.append(path)
        return "in-folder"

    async def loaded_folder(self, path):
        return "in-folder" if path in self.folders else None

    @property
    def has_default_folder(self):
        return self.default is not None

    async def default_name(self):
        await self.work()
        return self.default

    async def unload(self, selector, base=None):
        await self.work()
        self.bases.append(base)
        gone = tuple(ref for ref in self.known if selector in (ref.name, str(ref)))
        if not gone:
            raise UnknownModelError(f"no adapter {selector!r}")
        if selector in self.shares:
            raise ConflictError("a route leads to it")
        for ref in gone:
            del self.known[ref]
        return gone

    def route(self):
        return dict(self.shares)

    async def set_route(self, weights):
        await self.work()
        for selector in weights:
            self._ref(selector)
        self.before.append(self.shares)
        self.shares = {selector: weight / sum(weights.values()) for selector, weight in weights.items()}
        return self.route()

    async def rollback(self, name):
        await self.work()
        if name is None:
            if not self.before:
                raise ConflictError("the route was never changed")
            self.shares = self.before.pop()
            return self._ref(max(self.shares, key=self.shares.get)), self.route()
        live = self._ref(name)
        if live.version == 1:
            raise ConflictError(f"{name} has only one version")
        self._revive(AdapterRef(name, live.version - 1))
        return self._ref(name), self.route()

    def checkpoints(self):
        return tuple(self.saved)

    async def save_checkpoint(self, selector, step, tags, metrics):
        await self.work()
        step = len(self.saved) + 1 if step is None else step
        if any(card.step == step for card in self.saved):
            raise ConflictError(f"there is a checkpoint-{step} with other content")
        tags = ("latest", *tags)
        ref = self._ref(selector or "math")
        self.saved.append(CheckpointCard(f"checkpoint-{step}", ref, step, "/secret", 1_800_000_000, tags, metrics))
        return self.saved[-1]

    def stats(self):
        return self.state

    @contextlib.contextmanager
    def _leased(self, ref):
        self.leased += 1
        try:
            yield ref
        finally:
            self.leased -= 1

    def _ref(self, selector):
        self.asked.append(selector)
        live = {ref.name: ref for ref, card in self.known.items() if card.live}
        named = {"base": BASE_ADAPTER, **live, **{str(ref): ref for ref in self.known}}
        if selector not in named:
            raise UnknownModelError(f"no adapter {selector!r}")
        return named[selector]

    def _revive(self, live):
        for ref, card in self.known.items():
            if ref.name == live.name:
                self.known[ref] = replace(card, live=ref == live)


class FakeCompetition(Asked):
    """Compares `policy`; `asked`: each start and stop."""

    def __init__(self):
        super().__init__()
        self.known = {}
        self.verdicts = {}

    async def start(self, adapter, spec, reader):
        reader.named(adapter, "policy")
        return self._change(adapter, spec, replace(COMPARISON, share=spec.share or 0.2))

    async def stop(self, adapter, reader):
        reader.named(adapter, "policy")
        ended = replace(COMPARISON, verdict="stopped", reason="asked", ended=1_800_000_060.0)
        return self._change(adapter, None, ended)

    def cards(self, reader):
        return tuple(card for card in self.known.values() if reader.sees(card.adapter))

    def ended(self, adapter):
        return self.verdicts

    def _change(self, adapter, spec, card):
        self.note((adapter, spec))
        self.known["policy"] = card
        return card


class FakeAverages(Asked):
    """Holds every average back. `asked`: the specs."""

    async def average(self, spec):
        self.note(spec)
        members = [AdapterRef(name, 1) for name in spec.adapters]
        return AverageCard("held", "too low", None, members, 8, 16, 0.25, "model.layers.0.mlp.up_proj", 0.5, None, None)


class FakeWhy(Asked):
    """Knows of one version of each adapter, which no update has made. `asked`: the arguments without the reader."""

    @property
    def answers(self):
        return self

    async def answer(self, spec, reader):
        self.note(spec)
        if spec.given is not None:
            reader.named(spec.version.partition("@")[0], "policy")
        elif spec.trajectory_id != "traj-0":
            raise UnknownTrajectoryError("no such answer")
        return WhyAnswer("math@2", "math@2", True, "cosine", -1.5, 0, 0, 0, (), (), (), ())

    async def version(self, version, number, limit, reader):
        name = reader.named(None if version is None else version.partition("@")[0], "policy")
        self.note((version, number, limit))
        return WhyVersion(version or name, "0123", "", (), (), 0, 0, (), {}, ())


class FakeForgetting(Asked):
    """Knows of nothing, so that all is forgotten at once. `asked`: what is to be forgotten, and whether to ignore the
    floor."""

    card = ForgetCard("done", "the key alice")

    async def plan(self, spec):
        return ForgetPlan(str(spec), (), "all")

    async def begin(self, spec, ignore_floor):
        self.note((replace(spec, asked_at=0.0), ignore_floor))
        return self.card


class FakeRewardModels(Asked):
    """Trains every reward model at once, and gives a row its length. `asked`: the specs, and names with their rows."""

    async def train(self, spec):
        self.note(spec)
        return RewardModelCard(spec.name, f"reward_model:{spec.name}", 90, 12, 0.25, 0.875, 10, 0.9, 0.6, 0.98)

    def unknown(self, name):
        return no_reward_model(name)

    async def score(self, name, rows):
        self.note((name, rows))
        return [float(len(row)) for row in rows]


HELLO = ({"role": "user", "content": "Hello"},)
LESSON = LessonSpec((HELLO,), LessonRule(RuleKind.WORD, "yes"), None, 8, None, 4, 1.0, 1e-3)


class FakeLessons(Asked):
    """Begins every lesson at once; LESSON is stopped if none was begun. `asked`: the specs. `last`: the card."""

    def __init__(self):
        super().__init__()
        self.last = None

    def obstacle(self):
        return ""

    def card(self, reader):
        return self.last if self.last is not None and reader.sees(self.last.adapter) else None

    async def start(self, spec, reader):
        reader.named(spec.adapter, "policy")
        self.note(spec)
        self.last = self._begun(spec)
        return self.last

    def _begun(self, spec):
        prompts = tuple(map(LessonPrompt, spec.prompts))
        sizes = (spec.max_tokens, spec.group_size, spec.temperature, spec.learning_rate, 24, spec.updates)
        begun = ("lesson-1", spec.adapter or "policy", None, "checkpoint-0", {spec.rule.kind.value: spec.rule.text})
        return LessonCard(*begun, *sizes, prompts, 1_800_000_000.0, "drawing")

    async def stop(self, reader):
        if self.last is not None and not reader.sees(self.last.adapter):
            raise ConflictError("No lesson runs.")
        if self.error:
            raise self.error
        stopped = {"outcome": LessonOutcome.STOPPED, "reason": "it was stopped", "ended": 1_800_000_060.0}
        self.last = replace(self.last or self._begun(LESSON), state="ended", **stopped)
        return self.last


class FakeTraining(Working):
    """Trains the adapters of `state`, `policy` by default; has the scorer `exact`, which reads `metadata.answer`.

    `checked`: (collection, adapter) of each check; `checks_go_on` set: they end. `collected`: requests whose events
    `collect` was given. `calls`: what else was asked. `given`: groups that wait; `given_earlier`: ids of those of an
    earlier process. `found`: trajectories that edits may name; `edits`: what came of them. `saves`: names that `trains`
    says yes to. `told`: the events, the last one None;
    `listening`: listeners now. `buffer`: has the groups that can be read. `extras`: what requests ask for by name.
    """

    def __init__(self, **extras):
        super().__init__()
        self.extras = extras
        self.state = {"policy": TrainingStatus(state="running", adapter="policy", trained=("policy",))}
        self.report = UpdateReport(AdapterRef("policy", 2), 1, "published")
        self.found = {"traj-0": FoundTrajectory("policy", (1, 2), (3, 257), "c")}
        self.edits = []
        self.past = ()
        self.checked = []
        self.prompts = []
        self.collected = []
        self.checks_go_on = asyncio.Event()
        self.checks_go_on.set()
        self.calls = []
        self.given = []
        self.given_earlier = []
        self.told = asyncio.Queue()
        self.saves = ()
        self.listening = 0
        self.listened_after = []
        self.trajectories = self
        self.buffer = TrajectoryBuffer(1000)
        self.collected_groups = GroupReader(self.buffer)

    async def check(self, collection, adapter, reader, prompt=None):
        await self.checks_go_on.wait()
        self.checked.append((collection, adapter))
        self.prompts.append(prompt)
        if adapter == BASE_ADAPTER and not reader.sees("policy"):
            raise ConflictError("base is not trained here", param="collect_trajectory")
        if self.error:
            raise self.error
        if collection.scorer not in (None, "exact"):
            raise InvalidRequestError(f"unknown scorer {collection.scorer!r}", param="scoring_function")
        if collection.scorer and "answer" not in collection.metadata:
            raise InvalidRequestError("exact reads metadata.answer", param="metadata")
        return collection

    def collect(self, request, events):
        self.collected.append(request)
        return events

    async def give(self, group):
        await self.work()
        self.given.append(group)

    def sizes(self):
        sizes = {}
        for group in self.given:
            sizes.setdefault(group.source, []).append(len(group.trajectories))
        return sizes

    async def last(self, count):
        return self.given_earlier[:count]

    async def feedback(self, trajectory_id, score, user, reader):
        if self.error:
            raise self.error
        if trajectory_id not in self.found:
            raise UnknownTrajectoryError(f"no trajectory {trajectory_id!r}", param="trajectory_id")
        self.calls.append(("feedback", trajectory_id, score, user))
        return FeedbackCard(score / 2, 2)

    async def find(self, trajectory_id, reader):
        if trajectory_id not in self.found:
            raise UnknownTrajectoryError(f"No trajectory of this run has the id {trajectory_id!r}.")
        return self.found[trajectory_id]

    async def edit(self, edit, reader):
        reader.named(edit.adapter, "policy")
        if self.error:
            raise self.error
        self.edits.append(edit)
        return EditCard("edit-0", edit.signal, edit.adapter, 1, 16)

    def signal_report(self, adapter, reader):
        source = SourceReport("feedback", 3, 1, 1, {"stale": 1}, 1, 1.0, 0.25)
        ledger = SourceLedger()
        ledger.learnt("policy", {"ann": 0.5, reader.name: 0.25, "": 0.25}, {"step_scale": 1.0})
        return SignalReport(self.status(adapter, reader=reader).adapter, 4, 2, (source,), ledger.keys("policy", reader))

    async def reward_tokens(self, trajectory_id, rewards, reader):
        self.calls.append(("reward_tokens", trajectory_id, list(rewards)))

    async def reward_episode(self, episode_id, group_id, score, reader):
        if self.error:
            raise self.error
        self.calls.append(("reward_episode", episode_id, group_id, score))

    async def close_group(self, group_id, reader):
        if self.error:
            raise self.error
        self.calls.append(("close_group", group_id))
        return GroupCard(group_id, "policy", 4, 3, True)

    async def update(self, adapter=None, given=None, publish=True, checkpoint_name=None, signal=None, *, reader):
        await self._work(reader, "update", adapter, given, publish, checkpoint_name, *([signal] if signal else []))
        return self.report

    def status(self, adapter=None, *, reader):
        name = reader.named(adapter, "policy")
        if name not in self.state:
            raise UnknownModelError(f"no adapter {name!r} is trained here")
        status = self.state[name]
        return replace(status, trained=tuple(filter(reader.sees, status.trained)))

    @property
    def default_adapter(self):
        return "policy"

    def statuses(self, *, reader):
        trained = next(iter(self.state.values())).trained
        return [self.status(name, reader=reader) for name in trained if reader.sees(name)]

    async def start(self, adapter=None, *, reader):
        name = reader.named(adapter, "policy")
        trained = (*self.state, name) if name not in self.state else tuple(self.state)
        self.state = {known: replace(status, trained=trained) for known, status in self.state.items()}
        self.state.setdefault(name, TrainingStatus(state="idle", adapter=name, trained=trained))
        return await self._work(reader, "start", adapter)

    async def stop(self, adapter=None, *, reader):
        status = await self._work(reader, "stop", adapter)
        if status.adapter == self.default_adapter:
            raise ConflictError("the default adapter stays in training")
        trained = tuple(name for name in self.state if name != status.adapter)
        self.state = {name: replace(self.state[name], trained=trained) for name in trained}
        return replace(status, state="stopped", trained=trained)

    async def pause(self, adapter=None, *, reader):
        return await self._work(reader, "pause", adapter)

    async def resume(self, adapter=None, *, reader):
        return await self._work(reader, "resume", adapter)

    async def rollback(self, adapter=None, to=None, *, reader):
        if to == "nope":
            raise UnknownModelError("no checkpoint 'nope'")
        return await self._work(reader, "rollback", adapter, to)

    def trains(self, selector, *, reader):
        return (selector or "math") in self.saves and reader.sees(selector or "math")

    async def save(self, adapter, step, tags, metrics, *, reader):
        await self._work(reader, "save", None, adapter, step, tags, metrics)
        return CheckpointCard("checkpoint-9", AdapterRef("math", 2), 9, "/secret", 1_800_000_000, tuple(tags), metrics)

    def history(self, adapter, limit, *, reader):
        name = self.status(adapter, reader=reader).adapter
        return TrainingHistory(name, self.past[-limit:], len(self.past) > limit, "a-7")

    async def events(self, after="", *, reader):
        self.listening += 1
        self.listened_after.append(after)
        try:
            while (event := await self.told.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                if (seen := event.seen_by(reader)) is not None:
                    yield seen
        finally:
            self.listening -= 1

    async def _work(self, reader, name, adapter, *arguments):
        status = self.status(adapter, reader=reader)
        await self.work()
        self.calls.append((name, adapter, *arguments))
        return status
