import { useMemo } from "preact/hooks";
import type { Edited, Sample, Turn } from "../../api/trajectories";
import { Tokens } from "../../components/tokens";
import { number } from "../../format";
import { Pushed } from "../why/pushed";
import { FATE_WORDS } from "./fates";
import { because } from "./reasons";
import { Thumbs } from "./thumbs";
import { describe, lookOf, signed, type Tint } from "./tint";

interface Properties {
  /** Its place in the group, from 1. */
  order: number;
  sample: Sample;
  isEdit: boolean;
  tint: Tint;
  /** The advantage that has the strongest tint. */
  largest: number;
  /** What is said of thumbs on it. */
  note: string;
  onDone: () => void;
}

/** One answer of a group, or one episode. */
export function SampleCard({ order, sample, isEdit, tint, largest, note, onDone }: Properties) {
  const { reward, advantage, fate, reason, turns, turns_left_out } = sample;
  const name = isEdit ? (order === 1 ? "Better" : "Worse") : `Answer ${order}`;
  return (
    <article class="sample" aria-label={name}>
      <h3>
        {name}{" "}
        <small>
          {reward === null ? "no reward" : `reward ${number(reward)}`}
          {advantage !== null && `, advantage ${signed(advantage)}`}
          {` · ${FATE_WORDS[fate]}`}
          {reason && `: ${because(reason)}`}
        </small>
      </h3>
      {turns_left_out > 0 && <p class="about">{turns_left_out} earlier turns are not shown.</p>}
      {turns.map((turn) => (
        <OneTurn key={turn.trajectory_id} {...{ turn, tint, largest }} label={name} />
      ))}
      {note && <p class="about">{note}</p>}
      {turns.map((turn, place) => (
        <Thumbs
          key={turn.trajectory_id}
          {...{ turn, sample, isEdit, onDone }}
          name={turns.length > 1 ? `${name}, turn ${place + 1}` : name}
        />
      ))}
      {!isEdit &&
        turns
          .filter((turn) => turn.lora_version !== null && turn.lora_version !== "base@0")
          .map((turn) => <Pushed key={turn.trajectory_id} id={turn.trajectory_id} name={name} />)}
      <Edits edits={turns.flatMap((turn) => turn.edits)} />
    </article>
  );
}

interface TurnProperties extends Pick<Properties, "tint" | "largest"> {
  turn: Turn;
  label: string;
}

function OneTurn({ turn, label, tint, largest }: TurnProperties) {
  const { context, tokens, tokens_left_out: leftOut } = turn;
  const pieces = useMemo(
    () => tokens.map((token) => ({ text: token.text, look: lookOf(token, tint, largest) })),
    [tokens, tint, largest],
  );
  return (
    <>
      {context && <p class="between">{context}</p>}
      <Tokens
        label={`${label}, token by token; arrow keys go from one to the next`}
        pieces={pieces}
        about={(place) => tokens[place] && describe(tokens[place])}
      />
      {leftOut > 0 && <p class="about">{leftOut} more tokens are not shown.</p>}
    </>
  );
}

const Edits = ({ edits }: { edits: readonly Edited[] }) => (
  <>
    {edits.map((edit, order) => (
      <p key={order} class="edited">
        <b>{edit.signal === "corrections" ? "Corrected to" : "Preferred"}:</b> {edit.text}{" "}
        <small>
          {FATE_WORDS[edit.fate]}
          {edit.reason && `: ${because(edit.reason)}`}
        </small>
      </p>
    ))}
  </>
);
