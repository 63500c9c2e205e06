/** The lineage as a picture: a point for each version, and a line to the one that it was trained from. */

import type { Version } from "./course";

const SHOWN = 80;
const STEP = 22;
const LANE = 20;
const EDGE = 14;

export function Tree({ versions, best }: { versions: readonly Version[]; best: string | null }) {
  const shown = versions.slice(-SHOWN);
  if (shown.length < 2) {
    return null;
  }
  const places = placesOf(shown);
  const height = 2 * EDGE + LANE * Math.max(...[...places.values()].map(({ lane }) => lane));
  const at = (name: string) => {
    const { order, lane } = places.get(name) ?? { order: 0, lane: 0 };
    return [EDGE + STEP * order, EDGE + LANE * lane] as const;
  };
  const width = 2 * EDGE + STEP * (shown.length - 1);
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: whoever uses the keyboard must be able to scroll it.
    <section class="tree" aria-label="Lineage of the versions" tabIndex={0}>
      <svg width={width} height={height} role="img" aria-label={spoken(shown, best)}>
        {shown.map(({ name, parent, fate }) =>
          parent !== null && places.has(parent) ? (
            <path key={name} class={fate === "rolled back" ? "gone" : ""} d={edge(at(parent), at(name))} />
          ) : null,
        )}
        {shown.map((version) => {
          const [x, y] = at(version.name);
          return (
            <circle
              key={version.name}
              class={`${version.fate.replaceAll(" ", "-")} ${version.checkpoint ? "saved" : ""}`}
              cx={x}
              cy={y}
              r={version.name === best ? 7 : 5}
            >
              <title>{`${version.name}: ${about(version, best)}`}</title>
            </circle>
          );
        })}
      </svg>
      <p class="legend">
        <span class="tag live">live</span>
        <span class="tag replaced">replaced</span>
        <span class="tag rolled-back">rolled back</span>
        <small>larger: the best version · with a ring: saved as a checkpoint</small>
      </p>
    </section>
  );
}

/** Each version in the order of time; what starts again from an older version has a lane of its own, below. */
function placesOf(versions: readonly Version[]): Map<string, { order: number; lane: number }> {
  const places = new Map<string, { order: number; lane: number }>();
  const continued = new Set<string>();
  let lanes = 0;
  versions.forEach(({ name, parent }, order) => {
    const from = parent === null ? undefined : places.get(parent);
    const branches = parent !== null && from !== undefined && continued.has(parent);
    lanes += branches ? 1 : 0;
    places.set(name, { order, lane: branches ? lanes : (from?.lane ?? 0) });
    continued.add(parent ?? "");
  });
  return places;
}

type Place = readonly [number, number];

const edge = ([x, y]: Place, [toX, toY]: Place): string =>
  y === toY ? `M${x} ${y}H${toX}` : `M${x} ${y}C${x + STEP} ${y} ${toX - STEP} ${toY} ${toX} ${toY}`;

const about = ({ name, fate, checkpoint }: Version, best: string | null): string =>
  [fate, ...(name === best ? ["best"] : []), ...(checkpoint ? [`saved as ${checkpoint}`] : [])].join(", ");

function spoken(versions: readonly Version[], best: string | null): string {
  const gone = versions.filter((version) => version.fate === "rolled back").length;
  const live = versions.find((version) => version.fate === "live");
  return `${versions.length} versions; live: ${live?.name ?? "none"}; best: ${best ?? "none"}; rolled back: ${gone}. The table below has each.`;
}
