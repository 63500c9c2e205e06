import type { ComponentChildren } from "preact";
import type { Stats } from "../api/stats";
import { now } from "../live/stats";
import { may } from "./action";
import { Card } from "./card";
import { Command } from "./command";

interface Properties {
  /** Begins the sentence that a key without the role is told: "How adapters learn is". */
  subject: string;
  /** The view, once it is known that the server trains and that the key may see it. */
  children: (stats: Stats, training: NonNullable<Stats["training"]>) => ComponentChildren;
}

/** A view about training, or why it cannot be shown: no figures yet, no training, or a key that may not see it. */
export function WithTraining({ subject, children }: Properties) {
  const stats = now.value;
  if (stats === null) {
    return <p class="empty">Asking the server…</p>;
  }
  if (stats.training === null) {
    return <NoTraining />;
  }
  if (!may("train")) {
    return (
      <p class="empty">
        {subject} shown to keys with the role train; yours is {stats.caller.role}. The operator of the server makes
        keys, and changes their roles.
      </p>
    );
  }
  return <>{children(stats, stats.training)}</>;
}

const NoTraining = () => (
  <Card title="This server does not train">
    <p>Start it with training, and it learns from the answers that it gives:</p>
    <Command text="mlx_parallm_serve --enable-rl-training --checkpoint-dir runs/first" />
    <p>With an environment it also draws answers to tasks by itself, so that there is something to see at once:</p>
    <Command text="mlx_parallm_serve --enable-rl-training --environment words --checkpoint-dir runs/words" />
  </Card>
);
