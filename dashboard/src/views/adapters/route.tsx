import { type Adapters, rollBack, setRoute } from "../../api/adapters";
import { Bar } from "../../components/bar";
import { Card } from "../../components/card";
import { Confirmed } from "../../components/confirmed";
import { counted, percent } from "../../format";

const COLORS = ["decode", "prefill", "training", "adapters", "weights"] as const;

/** Which versions the requests get that name none. */
export function Route({ adapters, onDone }: { adapters: Adapters; onDone: () => void }) {
  const parts = Object.entries(adapters.route).map(([label, value], order) => ({
    label,
    value,
    color: COLORS[order % COLORS.length] ?? "weights",
  }));
  return (
    <Card title="Requests that name no adapter" about="the share that each gets">
      <Bar title="Requests that name no adapter" parts={parts} format={percent} />
      <p class="about">
        Answered without an adapter since the server started: {counted(adapters.base_requests, "request")}.
      </p>
      <div class="controls below">
        <Confirmed
          needs="train"
          label="Undo the last change"
          disabled={!adapters.route_changed}
          title="Undo the last change of the shares?"
          run={() => rollBack().then(onDone)}
          done="The shares are as they were before."
        >
          Requests that name no adapter are split as before the last change.
        </Confirmed>
        <Confirmed
          needs="train"
          label="Serve the base model"
          title="Serve the base model by default?"
          run={() => setRoute({ base: 1 }).then(onDone)}
          done="Requests that name no adapter get the base model."
        >
          All requests that name no adapter get the base model, without any adapter.
        </Confirmed>
      </div>
    </Card>
  );
}
