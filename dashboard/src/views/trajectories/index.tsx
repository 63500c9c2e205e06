/** What the adapters learn from: prompts, the answers to them, their rewards, and what became of them. */

import { useEffect, useRef } from "preact/hooks";
import type { Filters as Chosen } from "../../api/trajectories";
import { WithTraining } from "../../components/with-training";
import { link, place, withQuery } from "../../router";
import { Filters } from "./filters";
import { OneGroup } from "./group";
import { List } from "./list";
import { isTint, type Tint } from "./tint";
import { useGroups } from "./use-groups";
import "../../style/learning.css";
import "../../style/teach.css";
import "../../style/trajectories.css";

const NAMES = ["lora_adapter", "lora_version", "fate", "min_reward", "max_reward"] as const;

export const TrajectoriesView = ({ rest }: { rest: readonly string[] }) => (
  <WithTraining subject="Collected answers are">
    {(stats) => <Collected opened={rest[0]} startedAt={stats.started_at} />}
  </WithTraining>
);

/** Filters, the list, and the group that is opened. The address has all that was chosen, so that it can be shared. */
function Collected({ opened, startedAt }: { opened: string | undefined; startedAt: number }) {
  const { query } = place.value;
  const filters: Chosen = Object.fromEntries(NAMES.flatMap((name) => (query[name] ? [[name, query[name]]] : [])));
  const groups = useGroups(filters, startedAt);
  const below = useRef<HTMLDivElement>(null);
  useEffect(() => below.current?.querySelector("h2")?.focus(), [opened]);
  const open = (id: string) => {
    location.hash = withQuery(link("trajectories", id), query);
  };
  const choose = (changes: Record<string, string>) => location.replace(addressWith(opened, { ...query, ...changes }));
  return (
    <>
      <Filters filters={filters} rows={groups.rows ?? []} onChange={choose} />
      <div class="cards one">
        <List groups={groups} filtered={Object.keys(filters).length > 0} opened={opened} onOpen={open} />
      </div>
      {opened && (
        <div ref={below}>
          <OneGroup
            key={opened}
            id={opened}
            tint={isTint(query.tint) ? query.tint : null}
            onTint={(tint: Tint) => choose({ tint })}
            onClose={() => location.replace(addressWith(undefined, query))}
          />
        </div>
      )}
    </>
  );
}

const addressWith = (opened: string | undefined, query: Record<string, string>): string =>
  withQuery(opened ? link("trajectories", opened) : link("trajectories"), query);
