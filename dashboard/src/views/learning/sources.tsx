import type { Report, Source } from "../../api/learning";
import { Card } from "../../components/card";
import { Table } from "../../components/table";
import { number, percent } from "../../format";
import { because } from "../trajectories/reasons";

/** What the adapter was taught by: how much came from each source, what became of it, and what changed since. */
export const Sources = ({ report }: { report: Report }) => (
  <Card title="Taught by" about="since the server started">
    <Table
      caption="Sources of what was learnt"
      rows={report.sources}
      keyOf={({ source }) => source}
      columns={[
        { title: "Source", cell: ({ source }) => NAMES[source] ?? source },
        { title: "Came", cell: ({ arrived }) => number(arrived), numeric: true },
        { title: "Wait", cell: ({ waiting }) => number(waiting), numeric: true },
        { title: "Learnt from", cell: ({ trained }) => number(trained), numeric: true },
        { title: "Updates", cell: ({ updates }) => number(updates), numeric: true },
        { title: "Share of gradients", cell: ({ gradient_share }) => percent(gradient_share), numeric: true },
        { title: "Reward since", cell: ({ reward_change }) => change(reward_change), numeric: true },
        { title: "Evaluation since", cell: ({ evaluation_change }) => change(evaluation_change), numeric: true },
        { title: "Dropped", cell: dropped },
      ]}
      empty="Nothing yet: no answer was collected, and nobody has said anything."
    />
    {report.keys.length > 0 && (
      <Table
        caption="Keys whose data the adapter has learnt from"
        rows={report.keys}
        keyOf={({ whose, key }) => `${whose} ${key}`}
        columns={[
          { title: "Key", cell: ({ whose, key }) => key ?? OWNERS[whose] ?? whose },
          { title: "Whole steps", cell: ({ steps }) => number(steps), numeric: true },
          { title: "Share of what was learnt", cell: ({ share }) => percent(share), numeric: true },
        ]}
        empty="Nothing yet."
      />
    )}
    <p class="about">
      Scores that people have sent: {number(report.opinions)}. People who gave a name with a score or an edit:{" "}
      {number(report.people)}.
    </p>
  </Card>
);

const NAMES: Record<string, string> = {
  scorers: "Scoring functions",
  environments: "Environments",
  feedback: "Thumbs in time",
  late_feedback: "Late thumbs",
  preferences: "Preferences",
  corrections: "Corrections",
  unrated: "Answers that nobody judged",
};

const OWNERS: Record<string, string> = {
  server: "Tasks of this server",
  others: "All other keys",
  unknown: "Not known",
};

const change = (value: number | null): string => (value === null ? "–" : `${value > 0 ? "+" : ""}${number(value)}`);

const dropped = ({ dropped: counts }: Source): string =>
  Object.entries(counts)
    .map(([reason, count]) => `${number(count)}: ${because(reason)}`)
    .join("; ") || "–";
