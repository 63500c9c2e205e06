import { useState } from "preact/hooks";
import { type WhySample, type WhyUpdate, type WhyVersion, whyVersion } from "../../api/why";
import { Action } from "../../components/action";
import { Table, type TableColumn } from "../../components/table";
import { counted, date, number, percent } from "../../format";
import { Said } from "./said";

/** What a version learnt from: its updates and, of one of them, the answers. */
export function LearntFrom({ version }: { version: string }) {
  const [found, setFound] = useState<WhyVersion | null>(null);
  const [opened, setOpened] = useState<WhyUpdate | null>(null);
  const open = ({ number }: WhyUpdate) =>
    void whyVersion(version, number).then(({ updates }) => setOpened(updates[0] ?? null));
  return found === null ? (
    <div class="controls">
      <Action needs="train" run={() => whyVersion(version).then(setFound)}>
        What it learnt from
      </Action>
    </div>
  ) : (
    <>
      <h3>What it learnt from</h3>
      <p class="about">{told(found)}</p>
      <Table
        caption={`Updates of ${version}`}
        rows={found.updates}
        keyOf={(update) => `${update.number}`}
        columns={UPDATES}
        onOpen={open}
        isOpen={(update) => update.number === opened?.number}
        empty="No update has made it."
      />
      {opened && (
        <>
          <h3>
            Update {opened.number} <small>{counted(opened.samples.length, "answer")}, largest share first</small>
          </h3>
          <Table
            caption={`Answers of update ${opened.number}`}
            rows={opened.samples}
            keyOf={(sample) => `${opened.samples.indexOf(sample)}`}
            columns={SAMPLES}
            empty={opened.problem || "It has no answers."}
          />
        </>
      )}
    </>
  );
}

function told({ updates_total, trajectories, start, missing, keys }: WhyVersion): string {
  const begins = missing.length
    ? `what came before is not known: changes ${missing.join(" to ")} are not in the journal any more`
    : start
      ? `starting from ${start}, which was not trained here`
      : "starting from the base model, as it is";
  const made = `${counted(updates_total, "update")}, which learnt from ${counted(trajectories, "answer")}`;
  return [`${made}, ${begins}.`, keys.length > 0 && `Whose: ${shares(keys)}.`].filter(Boolean).join(" ");
}

const shares = (keys: WhyVersion["keys"]): string =>
  keys
    .map(({ key, share }) => `${key === null ? "unnamed" : key || "the server's own tasks"} ${percent(share)}`)
    .join(", ");

const figure = (value: number | null): string => (value === null ? "–" : number(value));

const UPDATES: readonly TableColumn<WhyUpdate>[] = [
  { title: "Update", cell: (update) => update.number },
  { title: "Made", cell: (update) => date(Date.parse(update.at) / 1000) },
  { title: "Version", cell: (update) => update.version ?? "–" },
  { title: "Answers", cell: (update) => figure(update.trajectories), numeric: true },
  { title: "Mean reward", cell: (update) => figure(update.reward_mean), numeric: true },
  { title: "Keys", cell: (update) => shares(update.keys) || update.problem || "–" },
  { title: "New settings", cell: (update) => Object.keys(update.changed_settings).join(", ") || "–" },
];

const SAMPLES: readonly TableColumn<WhySample>[] = [
  { title: "Answer", cell: (sample) => <Said sample={sample} /> },
  { title: "Share", cell: (sample) => percent(sample.share), numeric: true },
  { title: "Reward", cell: (sample) => figure(sample.reward), numeric: true },
  { title: "Advantage", cell: (sample) => figure(sample.advantage), numeric: true },
  { title: "Key", cell: (sample) => sample.key ?? "–" },
];
