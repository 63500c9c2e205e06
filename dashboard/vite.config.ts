import { defineConfig } from "vite";
import { licenses } from "./licenses.ts";

/** `npm run dev` shows the sources, and asks this server for everything else. */
const SERVER = process.env.MLX_PARALLM_URL ?? "http://127.0.0.1:8000";

export default defineConfig({
  base: "/dashboard/",
  plugins: [licenses()],
  build: {
    outDir: "../mlx_parallm/server/dashboard/built",
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
  server: { proxy: { "^/(?!dashboard/)": SERVER } },
});
