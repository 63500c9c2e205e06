import { Card } from "../../components/card";
import { Command } from "../../components/command";

/** Why the server takes no lessons, and the command that starts one that does. */
export const Obstacle = ({ reason }: { reason: string }) => (
  <Card title="This server takes no lessons">
    <p>{reason}</p>
    <p>Stop it with Ctrl-C, and add the flag to your command:</p>
    <Command text={`uv run mlx_parallm_serve ${flagIn(reason)}`} />
  </Card>
);

/** The server's sentence names the flag. */
const flagIn = (reason: string): string => /--[a-z-]+/.exec(reason)?.[0] ?? "--enable-rl-training";
