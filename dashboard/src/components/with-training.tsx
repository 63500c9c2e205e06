import type { ComponentChildren } from "preact";
import type { Stats } from "../api/stats";
import { commandWith } from "../live/own-command";
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
    return <NoRole subject={subject} />;
  }
  return <>{children(stats, stats.training)}</>;
}

/** What a key without the role train is told. */
export const NoRole = ({ subject }: Pick<Properties, "subject">) => (
  <p class="empty">
    {subject} shown to keys with the role train; yours is {now.value?.caller.role}. The operator of the server makes
    keys, and changes their roles.
  </p>
);

const NoTraining = () => (
  <Card title="This server does not train">
    <p>Stop it with Ctrl-C, and start it with training: it then learns from the answers that it gives.</p>
    <Command text={commandWith("--enable-rl-training", "--checkpoint-dir runs/served")} />
    <p>With an environment it also draws answers to tasks by itself, so that there is something to see at once:</p>
    <Command text={commandWith("--enable-rl-training", "--environment words", "--checkpoint-dir runs/served-words")} />
  </Card>
);
