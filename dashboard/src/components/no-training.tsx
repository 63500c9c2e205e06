import { Card } from "./card";
import { Command } from "./command";

/** How to start a server that trains, for views that need one. */
export const NoTraining = () => (
  <Card title="This server does not train">
    <p>Start it with training, and it learns from the answers that it gives:</p>
    <Command text="mlx_parallm_serve --enable-rl-training --checkpoint-dir runs/first" />
    <p>With an environment it also draws answers to tasks by itself, so that there is something to see at once:</p>
    <Command text="mlx_parallm_serve --enable-rl-training --environment words --checkpoint-dir runs/words" />
  </Card>
);
