import { useMemo } from "preact/hooks";
import { rarity } from "../../components/rarity";
import { type Piece, Tokens } from "../../components/tokens";
import { percent } from "../../format";
import type { DrawnToken, TokenLogprob } from "../../live/chat";
import type { Answer, Part } from "./answer";

/** The text of an answer. The less likely a token was, the stronger is its tint. */
export function Likelihood({ answer }: { answer: Answer }) {
  const pieces = useMemo(() => answer.parts.map(pieceOf), [answer.parts]);
  return (
    <Tokens
      label={`Answer of ${answer.by || answer.model}; arrow keys move through its tokens`}
      pieces={pieces}
      about={(place) => <About part={answer.parts[place]} />}
    />
  );
}

function pieceOf({ text, reasoning, tokens }: Part): Piece {
  const looks = [rarity(Math.min(1, ...tokens.map(probability))), text ? "" : "sign", reasoning ? "reasoning" : ""];
  return { text: text || "end", look: looks.join(" ") };
}

const About = ({ part }: { part: Part | undefined }) => (
  <>
    {part?.tokens.map((token, place) => (
      <Alternatives key={place} token={token} />
    ))}
    {part?.tokens.length === 0 && "no probability"}
  </>
);

/** The token that was drawn, and the most likely ones in its place. */
function Alternatives({ token }: { token: DrawnToken }) {
  const others = token.top_logprobs.filter((other) => other.token !== token.token);
  return (
    <>
      <p>
        <b>
          <code>{visible(token.token)}</code> {likelihood(token)}
        </b>
      </p>
      {others.length > 0 && (
        <ul>
          {others.map((other) => (
            <li key={other.token}>
              <code>{visible(other.token)}</code> {likelihood(other)}
            </li>
          ))}
        </ul>
      )}
    </>
  );
}

const probability = ({ logprob }: TokenLogprob): number => Math.min(1, Math.exp(logprob));

const likelihood = (token: TokenLogprob): string => {
  const share = probability(token);
  return share < 0.001 ? "below 0.1 %" : percent(share);
};

/** Spaces and ends of lines can be seen. */
const visible = (token: string): string => token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
