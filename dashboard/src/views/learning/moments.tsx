import { Card } from "../../components/card";
import { Table } from "../../components/table";
import { clock } from "../../format";
import type { Moment } from "./course";

/** What has happened besides updates: divergences, rollbacks, pauses, checkpoints, lost events. */
export const Moments = ({ moments, truncated }: { moments: readonly Moment[]; truncated: boolean }) => (
  <Card
    title="Events"
    about={`besides updates, newest first${truncated ? "; older ones than these are not shown" : ""}`}
  >
    <Table
      caption="Events of the training"
      rows={moments.map((moment, order) => ({ ...moment, order })).reverse()}
      keyOf={({ at, order }) => `${at} ${order}`}
      columns={[
        { title: "Time", cell: ({ at }) => clock(Date.parse(at) / 1000) },
        { title: "Event", cell: ({ what, wrong }) => (wrong ? <b class="wrong">{what}</b> : what) },
        { title: "Why", cell: ({ why }) => why },
      ]}
      empty="Nothing yet. Rollbacks, pauses, checkpoints, divergences and plateaus are listed here."
    />
  </Card>
);
