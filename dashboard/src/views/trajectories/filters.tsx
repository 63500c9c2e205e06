import { useId } from "preact/hooks";
import { type Filters as Chosen, FATES, type GroupRow } from "../../api/trajectories";
import { now } from "../../live/stats";
import { FATE_WORDS } from "./fates";

interface Properties {
  filters: Chosen;
  /** What is listed, for suggestions. */
  rows: readonly GroupRow[];
  onChange: (changes: Chosen) => void;
}

const NONE = { lora_adapter: "", lora_version: "", fate: "", min_reward: "", max_reward: "" };

/** What the list shows. A choice counts when its field is left, or Enter is pressed. */
export function Filters({ filters, rows, onChange }: Properties) {
  const id = useId();
  const versions = [...new Set(rows.slice(0, 500).flatMap((row) => row.lora_versions))];
  return (
    <search class="filters">
      <label>
        Adapter
        <select
          value={filters.lora_adapter ?? ""}
          onChange={(event) => onChange({ lora_adapter: event.currentTarget.value })}
        >
          <option value="">all</option>
          {(now.value?.training?.adapters ?? []).map(({ name }) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
      </label>
      <label>
        Drawn by version
        <input
          type="text"
          list={id}
          placeholder="any; default@3"
          value={filters.lora_version ?? ""}
          onChange={(event) => onChange({ lora_version: event.currentTarget.value.trim() })}
        />
        <datalist id={id}>
          {versions.map((version) => (
            <option key={version} value={version} />
          ))}
        </datalist>
      </label>
      <label>
        Fate
        <select value={filters.fate ?? ""} onChange={(event) => onChange({ fate: event.currentTarget.value })}>
          <option value="">any</option>
          {FATES.map((fate) => (
            <option key={fate} value={fate}>
              {FATE_WORDS[fate]}
            </option>
          ))}
        </select>
      </label>
      <div class="bounds">
        <Bound name="min_reward" label="Reward from" {...{ filters, onChange }} />
        <Bound name="max_reward" label="to" {...{ filters, onChange }} />
      </div>
      {Object.keys(filters).length > 0 && (
        <button type="button" onClick={() => onChange(NONE)}>
          Show all
        </button>
      )}
    </search>
  );
}

interface BoundProperties extends Omit<Properties, "rows"> {
  name: "min_reward" | "max_reward";
  label: string;
}

const Bound = ({ name, label, filters, onChange }: BoundProperties) => (
  <label>
    {label}
    <input
      type="number"
      step="any"
      value={filters[name] ?? ""}
      onChange={(event) => onChange({ [name]: event.currentTarget.value })}
    />
  </label>
);
