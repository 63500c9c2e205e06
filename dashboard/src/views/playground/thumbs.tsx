import { Action } from "../../components/action";
import { toast } from "../../components/toast";
import type { Answer } from "./answer";
import { vote } from "./conversation";

interface Properties {
  answer: Answer;
  turn: number;
  side: number;
}

/** Rewards an answer that is collected. */
export function Thumbs({ answer, turn, side }: Properties) {
  const send = (score: 0 | 1) => vote(turn, side, score).then(toast);
  return (
    <div class="votes">
      {THUMBS.map(({ score, label, path }) => (
        <Action key={score} needs="train" run={() => send(score)} pressed={answer.score === score}>
          <svg viewBox="0 0 24 24" aria-hidden="true">
            <path d={path} />
          </svg>
          {label}
        </Action>
      ))}
    </div>
  );
}

const UP = "M2 10h4v11H2zM8 20V10l5-8c2 0 3 1 3 3l-1 4h5c2 0 3 1 2.5 3l-2 7c-.5 1.5-1.5 2-3 2H12c-2 0-3-.5-4-1z";
const DOWN = "M2 3h4v11H2zM8 4v10l5 8c2 0 3-1 3-3l-1-4h5c2 0 3-1 2.5-3l-2-7c-.5-1.5-1.5-2-3-2H12c-2 0-3 .5-4 1z";
const THUMBS = [
  { score: 1, label: "Good", path: UP },
  { score: 0, label: "Bad", path: DOWN },
] as const;
