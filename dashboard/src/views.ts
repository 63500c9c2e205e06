/** The views of the dashboard, in the order of the navigation. To add one, add a row; see README.md. */

import type { FunctionComponent } from "preact";
import type { Stats } from "./api/stats";
import { AdaptersView } from "./views/adapters";
import { ClusterView } from "./views/cluster";
import { LearningView } from "./views/learning";
import { NowView } from "./views/now";
import { PlaygroundView } from "./views/playground";
import { TeachView } from "./views/teach";
import { TrajectoriesView } from "./views/trajectories";

export interface View {
  /** The first part of the address after `#/`. */
  name: string;
  /** What the navigation and the browser's tab show. */
  title: string;
  /** `rest`: what follows the name in the address. */
  component: FunctionComponent<{ rest: readonly string[] }>;
  /** Whether the navigation has it; without this function, always. The address works on every server. */
  isListed?: (stats: Stats | null) => boolean;
}

/** Not for keys that the server would only tell that they may not see it. */
const teaches = (stats: Stats | null): boolean => stats?.caller.role !== "inference";

export const VIEWS: readonly [View, ...View[]] = [
  { name: "now", title: "Now", component: NowView },
  { name: "learning", title: "Learning", component: LearningView, isListed: teaches },
  { name: "trajectories", title: "Trajectories", component: TrajectoriesView, isListed: teaches },
  { name: "adapters", title: "Adapters", component: AdaptersView },
  { name: "playground", title: "Playground", component: PlaygroundView },
  { name: "teach", title: "Teach", component: TeachView, isListed: teaches },
  { name: "cluster", title: "Cluster", component: ClusterView, isListed: (stats) => stats?.cluster ?? false },
];
