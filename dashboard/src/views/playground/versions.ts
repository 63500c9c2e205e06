/** The versions that can be asked, in groups, and which of them learn. */

import { useCallback } from "preact/hooks";
import { type AdapterVersion, adapters, type Checkpoint, checkpoints } from "../../api/adapters";
import { type TrainingState, trainingState } from "../../api/learning";
import { type Model, models } from "../../api/models";
import { may } from "../../components/action";
import { usePolled } from "../../live/polled";
import { now } from "../../live/stats";

const EVERY_MS = 4000;

export interface Choice {
  /** The name that a request has. */
  name: string;
  label: string;
}

export interface Group {
  title: string;
  choices: readonly Choice[];
}

export interface Known {
  models: readonly Model[];
  versions: readonly AdapterVersion[];
  /** Empty without the role train. */
  checkpoints: readonly Checkpoint[];
  /** Of the default adapter; null if the server does not train, or without the role train. */
  training: TrainingState | null;
}

/** Asks for them again and again, because each update makes a version. */
export function useKnown(): { known: Known | null; why: string } {
  const trains = may("train") && now.value?.training != null;
  const ask = useCallback(async (): Promise<Known> => {
    const [named, all, saved, training] = await Promise.all([
      models(),
      adapters(),
      may("train") ? checkpoints() : [],
      trains ? trainingState() : null,
    ]);
    return { models: named, versions: all.data, checkpoints: saved, training };
  }, [trains]);
  const { value, refused } = usePolled(`${trains}`, ask, EVERY_MS);
  return { known: value, why: refused?.message ?? "" };
}

/** The first base model is called `base`: its own name means whatever requests get that name no adapter. */
export function groupsOf({ models: named, versions, checkpoints: saved, training }: Known): Group[] {
  const first = named[0]?.root;
  const bases = named.filter((model) => model.parent === null && model.root !== first);
  const live = named.filter((model) => model.parent !== null);
  const older = versions.filter((version) => !version.live);
  const loaded = new Set(versions.map((version) => version.id));
  // A checkpoint is only known by its name if it is one of the default adapter.
  const onDisk = saved.filter(
    (each) => !loaded.has(each.lora_adapter) && nameOf(each.lora_adapter) === training?.lora_adapter,
  );
  return [
    { title: "Base models", choices: [{ name: "base", label: `${first} (base)` }, ...bases.map(ofBase)] },
    { title: "Adapters", choices: live.map(ofLive) },
    { title: "Other versions", choices: older.map(({ id }) => ({ name: id, label: id })).reverse() },
    { title: "Checkpoints", choices: onDisk.map(ofCheckpoint).reverse() },
  ].filter(({ choices }) => choices.length > 0);
}

const ofBase = ({ id, state }: Model): Choice => ({
  name: id,
  label: state === "idle" ? `${id} (loaded when it is asked)` : id,
});

const ofLive = ({ id, version }: Model): Choice => ({
  name: id,
  label: version ? `${id} (live, now version ${version})` : `${id} (its base model is loaded when it is asked)`,
});

const ofCheckpoint = ({ name, lora_adapter: id }: Checkpoint): Choice => ({ name, label: `${id} (${name})` });

/** The adapter of `name@version`. */
const nameOf = (id: string): string => id.replace(/@.*/, "");

/**
 * Whether answers of the version can be learnt from. Before its first update, the default adapter answers as the base
 * model does.
 */
export function learns(name: string, trained: readonly string[], known: Known): boolean {
  if (name === "base") {
    return known.training !== null && known.training.live_lora === null;
  }
  const saved = known.checkpoints.find((each) => each.name === name);
  return trained.includes(nameOf(saved?.lora_adapter ?? name));
}
