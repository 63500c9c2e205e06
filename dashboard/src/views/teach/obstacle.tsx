import { Card } from "../../components/card";
import { Command } from "../../components/command";
import { commandWith } from "../../live/own-command";

/** Why the server takes no lessons, and its own command with the flag that changes that. */
export const Obstacle = ({ reason }: { reason: string }) => (
  <Card title="This server takes no lessons">
    <p>{reason}</p>
    <p>Stop it with Ctrl-C, and start it with the flag:</p>
    <Command text={commandWith(...flagsFor(reason))} />
  </Card>
);

/** The server's sentence names the flag; a server that trains has a folder for it already. */
function flagsFor(reason: string): readonly string[] {
  const flag = /--[a-z-]+/.exec(reason)?.[0] ?? "--enable-rl-training";
  return flag === "--enable-rl-training" ? [flag, "--checkpoint-dir runs/served"] : [flag];
}
