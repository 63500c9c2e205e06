import { useState } from "preact/hooks";
import { load } from "../../api/adapters";
import { Confirmed } from "../../components/confirmed";

/** Loads an adapter from a folder of the server's machine. */
export function Load({ onDone }: { onDone: () => void }) {
  const [name, setName] = useState("");
  const [path, setPath] = useState("");
  return (
    <div class="controls">
      <Confirmed
        needs="train"
        label="Load an adapter…"
        title="Load an adapter"
        run={() => load(name, path).then(onDone)}
        done={`${name} is loaded.`}
      >
        Its files are read, checked, and served under this name. If the name is in use, later requests with it get the
        new version.
        <label class="entry">
          Name
          <input type="text" value={name} required onInput={(event) => setName(event.currentTarget.value)} />
        </label>
        <label class="entry">
          Folder on the server, below --adapter-dir or --allowed-adapter-roots
          <input type="text" value={path} required onInput={(event) => setPath(event.currentTarget.value)} />
        </label>
      </Confirmed>
    </div>
  );
}
