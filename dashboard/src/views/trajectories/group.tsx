import { type Group, group } from "../../api/trajectories";
import { number } from "../../format";
import { usePolled } from "../../live/polled";
import { FateTag } from "./fates";
import { Legend } from "./legend";
import { SampleCard } from "./sample";
import { standing } from "./thumbs";
import { largestAdvantage, type Tint } from "./tint";

const EVERY_MS = 3000;

interface Properties {
  id: string;
  /** What is chosen; null: advantages if there are any. */
  tint: Tint | null;
  onTint: (tint: Tint) => void;
  onClose: () => void;
}

/** One group: its prompt, and its answers side by side. */
export function OneGroup({ id, tint, onTint, onClose }: Properties) {
  const { value, refused, again } = usePolled(id, () => group(id), EVERY_MS);
  return (
    <section class="card" aria-labelledby="group">
      <div class="heading">
        <h2 id="group" tabIndex={-1}>
          Group <small>{id}</small>
        </h2>
        <button type="button" onClick={onClose}>
          Close
        </button>
      </div>
      {value === null ? (
        <p class="empty">{refused?.message ?? "Asking the server…"}</p>
      ) : (
        <Opened group={value} {...{ tint, onTint }} onDone={again} />
      )}
    </section>
  );
}

function Opened({
  group: opened,
  tint,
  onTint,
  onDone,
}: Pick<Properties, "tint" | "onTint"> & { group: Group; onDone: () => void }) {
  const largest = largestAdvantage(opened);
  const chosen = tint ?? (largest > 0 ? "advantage" : "logprob");
  const isEdit = opened.signal === "preferences" || opened.signal === "corrections";
  const notes = isEdit ? opened.members.map(() => "") : opened.members.map(standing);
  const same = notes.every((note) => note === notes[0]);
  return (
    <>
      <dl class="facts">
        <dt>Fate</dt>
        <dd>
          <FateTag {...opened} />
        </dd>
        <dt>Mean reward</dt>
        <dd>
          {opened.reward === null ? "none yet" : number(opened.reward)}
          {opened.scoring_function && !isEdit && `, by ${opened.scoring_function}`}
        </dd>
        <dt>Teaches</dt>
        <dd>{opened.lora_adapter}</dd>
        <dt>Drawn by</dt>
        <dd>{opened.lora_versions.join(", ") || "another program"}</dd>
      </dl>
      <h3>
        Prompt <small>{number(opened.prompt_tokens)} tokens, as the model read them</small>
      </h3>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: whoever uses the keyboard must be able to scroll it. */}
      <pre class="prompt" tabIndex={0}>
        {opened.full_prompt}
      </pre>
      <Legend tint={chosen} largest={largest} onTint={onTint} />
      {same && notes[0] && <p class="note">{notes[0]}</p>}
      <div class="sides">
        {opened.members.map((sample, order) => (
          <SampleCard
            key={sample.turns[0]?.trajectory_id}
            {...{ sample, isEdit, largest, onDone }}
            tint={chosen}
            order={order + 1}
            note={same ? "" : (notes[order] ?? "")}
          />
        ))}
      </div>
      {opened.samples > opened.members.length && (
        <p class="about">{number(opened.samples - opened.members.length)} more answers are not shown.</p>
      )}
    </>
  );
}
