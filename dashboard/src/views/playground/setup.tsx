import { useId } from "preact/hooks";
import { may } from "../../components/action";
import { Card } from "../../components/card";
import { now } from "../../live/stats";
import type { Settings } from "./conversation";
import type { Group } from "./versions";

/** One side, or two with the second name. */
export interface Sides {
  first: string;
  /** Empty: only one version answers. */
  second: string;
}

interface Properties {
  groups: readonly Group[];
  sides: Sides;
  onSides: (sides: Sides) => void;
  settings: Settings;
  onSettings: (settings: Settings) => void;
}

/** Who answers, and how. */
export const Setup = ({ groups, sides, onSides, settings, onSettings }: Properties) => (
  <Card title="Versions" about="they get the same prompts and the same seed">
    <div class="sides">
      <Select label="Version" groups={groups} name={sides.first} onChange={(first) => onSides({ ...sides, first })} />
      <Select
        label="Compared with"
        groups={[{ title: "One version", choices: [{ name: "", label: "none" }] }, ...groups]}
        name={sides.second}
        onChange={(second) => onSides({ ...sides, second })}
      />
    </div>
    <More settings={settings} onChange={(changes) => onSettings({ ...settings, ...changes })} />
  </Card>
);

interface SelectProperties {
  label: string;
  groups: readonly Group[];
  name: string;
  onChange: (name: string) => void;
}

/** A version that was unloaded stays chosen, and its next answer says why there is none. */
function Select({ label, groups, name, onChange }: SelectProperties) {
  const id = useId();
  const isKnown = groups.some(({ choices }) => choices.some((choice) => choice.name === name));
  return (
    <p class="field">
      <label for={id}>{label}</label>
      <select id={id} value={name} onChange={(event) => onChange(event.currentTarget.value)}>
        {!isKnown && <option value={name}>{name} (not here any more)</option>}
        {groups.map((group) => (
          <optgroup key={group.title} label={group.title}>
            {group.choices.map((choice) => (
              <option key={choice.name} value={choice.name}>
                {choice.label}
              </option>
            ))}
          </optgroup>
        ))}
      </select>
    </p>
  );
}

function More({ settings, onChange }: { settings: Settings; onChange: (changes: Partial<Settings>) => void }) {
  const id = useId();
  return (
    <details>
      <summary>
        Settings{" "}
        <small>
          temperature {settings.temperature}, at most {settings.maxTokens} tokens, seed {settings.seed}
        </small>
      </summary>
      <p class="field">
        <label for={`${id}-system`}>System prompt</label>
        <textarea
          id={`${id}-system`}
          rows={2}
          value={settings.system}
          onInput={(event) => onChange({ system: event.currentTarget.value })}
        />
      </p>
      <div class="numbers">
        {NUMBERS.map(({ field, label, ...range }) => (
          <p key={field} class="field">
            <label for={`${id}-${field}`}>{label}</label>
            <input
              id={`${id}-${field}`}
              type="number"
              required
              {...range}
              value={settings[field]}
              onInput={({ currentTarget: input }) => input.validity.valid && onChange({ [field]: input.valueAsNumber })}
            />
          </p>
        ))}
      </div>
    </details>
  );
}

const NUMBERS = [
  { field: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { field: "maxTokens", label: "Longest answer, in tokens", min: 1, max: 2048, step: 1 },
  { field: "seed", label: "Seed", min: 0, max: 2_147_483_647, step: 1 },
] as const;

interface LearnProperties {
  checked: boolean;
  onChange: (checked: boolean) => void;
  /** The names on the sides, and those of them whose answers can be learnt from. */
  chosen: readonly string[];
  learning: readonly string[];
}

/** Whether answers are collected, so that thumbs reward them; or why that cannot be. */
export function Learn({ checked, onChange, chosen, learning }: LearnProperties) {
  const id = useId();
  const obstacle = obstacleTo(chosen, learning);
  return (
    <div class="learn">
      <label>
        <input
          type="checkbox"
          checked={checked && obstacle === ""}
          disabled={obstacle !== ""}
          aria-describedby={id}
          onChange={(event) => onChange(event.currentTarget.checked)}
        />
        Learn from my thumbs
      </label>
      <small id={id}>{obstacle || meaning(chosen, learning)}</small>
    </div>
  );
}

function obstacleTo(chosen: readonly string[], learning: readonly string[]): string {
  if (now.value?.training == null) {
    return "This server does not train; --enable-rl-training starts one that does.";
  }
  if (!may("train")) {
    return `It needs a key with the role train; yours is ${now.value.caller.role}.`;
  }
  return learning.length === 0
    ? `Not in training here: ${chosen.join(", ")}. The view Adapters trains an adapter.`
    : "";
}

function meaning(chosen: readonly string[], learning: readonly string[]): string {
  const others = chosen.filter((name) => !learning.includes(name));
  const apart = others.length > 0 ? ` Not of ${others.join(", ")}, because it is not in training.` : "";
  return `Answers are collected, and a thumb on one is its reward in the next update.${apart}`;
}
