import type { Answer, Turn } from "./answer";
import { turns } from "./conversation";
import { Likelihood } from "./likelihood";
import { Thumbs } from "./thumbs";

/** What was asked and answered, the answers to each question side by side. */
export const Transcript = () => (
  <ol class="turns">
    {turns.value.map((turn, place) => (
      <OneTurn key={place} turn={turn} place={place} />
    ))}
  </ol>
);

const OneTurn = ({ turn, place }: { turn: Turn; place: number }) => (
  <li class="card">
    <p class="question">
      <span class="hidden">Question: </span>
      {turn.question}
    </p>
    <div class="sides">
      {turn.answers.map((answer, side) => (
        <Side key={side} answer={answer} turn={place} side={side} />
      ))}
    </div>
  </li>
);

function Side({ answer, turn, side }: { answer: Answer; turn: number; side: number }) {
  const tokens = answer.parts.reduce((sum, part) => sum + part.tokens.length, 0);
  return (
    <section>
      <h3>
        {answer.by || answer.model} <small>{tokens > 0 && `${tokens} tokens`}</small>
      </h3>
      {answer.parts.length > 0 && <Likelihood answer={answer} />}
      <State answer={answer} />
      {answer.trajectory && <Thumbs answer={answer} turn={turn} side={side} />}
    </section>
  );
}

function State({ answer: { state, why, parts } }: { answer: Answer }) {
  if (state === "failed") {
    return (
      <p class="problem" role="alert">
        No whole answer: {why}
      </p>
    );
  }
  const said = SAID[state] ?? (parts.length === 0 && state === "asked" ? "…" : "");
  return (
    <>
      {said && <p class="about">{said}</p>}
      {why && <p class="about">{why}</p>}
    </>
  );
}

const SAID: Partial<Record<Answer["state"], string>> = {
  "cut off": "It was cut off at the largest number of tokens.",
  repeated: "It repeated itself without end and was ended.",
  stopped: "It was stopped.",
};
