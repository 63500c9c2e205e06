import type { GroupRow } from "../../api/trajectories";
import { Card } from "../../components/card";
import { Table, type TableColumn } from "../../components/table";
import { clock, number } from "../../format";
import { FateTag } from "./fates";
import { NothingCollected } from "./nothing";
import { type Groups, LOOKED_AT } from "./use-groups";

interface Properties {
  groups: Groups;
  filtered: boolean;
  opened: string | undefined;
  onOpen: (id: string) => void;
}

/** All groups that pass the filters. */
export function List({ groups, filtered, opened, onOpen }: Properties) {
  const { rows, fresh, more, refused, older, again, made } = groups;
  return (
    <Card title="Groups" about="answers to one prompt, whose rewards are compared; newest first">
      <p class="hidden" role="status">
        {fresh > 0 ? "New groups have come." : ""}
      </p>
      {fresh > 0 && (
        <p class="fresh">
          <button type="button" onClick={again}>
            Show {fresh >= LOOKED_AT ? `${LOOKED_AT} or more` : fresh} new {fresh === 1 ? "group" : "groups"}
          </button>
        </p>
      )}
      {refused || rows === null ? (
        <p class="empty">{refused?.message ?? "Asking the server…"}</p>
      ) : rows.length === 0 ? (
        <NothingCollected filtered={filtered} />
      ) : (
        <Table
          key={made}
          caption="Groups"
          rows={rows}
          columns={COLUMNS}
          keyOf={(row) => `${row.number}`}
          onOpen={(row) => onOpen(row.group_id)}
          isOpen={(row) => row.group_id === opened}
          onEnd={older}
          more={more}
          empty=""
        />
      )}
    </Card>
  );
}

/** How it teaches, if not by its rewards. */
const SIGNALS: Readonly<Record<GroupRow["signal"], readonly string[]>> = {
  rewards: [],
  late_feedback: ["late thumbs"],
  preferences: ["a preference"],
  corrections: ["a correction"],
};

const COLUMNS: readonly TableColumn<GroupRow>[] = [
  { title: "Prompt", cell: (row) => <span class="start">{row.prompt || "(empty)"}</span> },
  { title: "Reward", cell: (row) => (row.reward === null ? "–" : number(row.reward)), numeric: true },
  { title: "Fate", cell: (row) => <FateTag {...row} /> },
  { title: "Answers", cell: (row) => number(row.samples), numeric: true },
  { title: "Drawn by", cell: (row) => row.lora_versions.join(", ") || "–" },
  { title: "Teaches", cell: (row) => [row.lora_adapter, ...SIGNALS[row.signal]].join(", ") },
  { title: "Time", cell: (row) => clock(Date.parse(row.created) / 1000) },
];
