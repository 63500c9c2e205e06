import { Card } from "../../components/card";
import { Command } from "../../components/command";
import { commandWith } from "../../live/own-command";

/** How to make this server the head of a cluster. */
export const NoCluster = () => (
  <Card title="This server is not a node of a cluster">
    <p>Stop it with Ctrl-C, and start it as the head of one: other machines can serve its requests with it.</p>
    <Command text={commandWith("--mode inference", "--share-model")} />
  </Card>
);

/** How another machine joins. */
export const AddNode = () => (
  <Card title="Add a node">
    <p>
      On another machine, with the token that the head names when it starts, and with the address of the head as that
      machine reaches it:
    </p>
    <Command
      text={`export MLX_PARALLM_CLUSTER_TOKEN=…\nmlx_parallm_serve --mode inference --connect-to ${location.host}`}
    />
    <p>Or let it train an adapter on the requests with collect_trajectory that any node answers:</p>
    <Command text={`mlx_parallm_train --mode rl --connect-to ${location.host}`} />
  </Card>
);
