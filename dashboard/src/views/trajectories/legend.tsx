import { useId } from "preact/hooks";
import { RARE } from "../../components/rarity";
import { signed, type Tint } from "./tint";

interface Properties {
  tint: Tint;
  largest: number;
  onTint: (tint: Tint) => void;
}

const TITLES: Readonly<Record<Tint, string>> = { advantage: "advantage", logprob: "log-probability" };

/** Chooses what tints the tokens, and says what the tints mean. */
export function Legend({ tint, largest, onTint }: Properties) {
  const id = useId();
  return (
    <fieldset class="choices tints">
      <legend>Tint of each token</legend>
      {Object.entries(TITLES).map(([each, title]) => (
        <label key={each}>
          <input type="radio" name={id} checked={each === tint} onChange={() => onTint(each as Tint)} />
          {title}
        </label>
      ))}
      <p class="meaning">{tint === "advantage" ? <Advantages largest={largest} /> : <Probabilities />}</p>
    </fieldset>
  );
}

const Advantages = ({ largest }: { largest: number }) =>
  largest === 0 ? (
    <>No update has computed advantages for this group.</>
  ) : (
    <>
      <span class="token less less-4">made less likely</span>
      underlined, down to {signed(-largest)} <span class="token more more-4">made more likely</span>
      up to {signed(largest)}. The larger the advantage, the stronger the tint.
    </>
  );

const Probabilities = () => (
  <>
    The less probable a token was when it was drawn, the stronger:{" "}
    {RARE.map((bound, order) => (
      <span key={bound} class={`token rare-${order + 1}`}>
        below {100 * bound} %
      </span>
    ))}
  </>
);
