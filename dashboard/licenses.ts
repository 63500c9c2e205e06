/** Writes the licences of all packages whose code is in the bundle to one file, which the page links. */

import { existsSync, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import type { Plugin } from "vite";

const PACKAGE = /^.*\/node_modules\/(?:@[^/]+\/)?[^/]+/;

export function licenses(): Plugin {
  let file = "";
  return {
    name: "licenses",
    apply: "build",
    generateBundle(_options, bundle) {
      const modules = Object.values(bundle).flatMap((chunk) => (chunk.type === "chunk" ? chunk.moduleIds : []));
      const folders = new Set(modules.flatMap((id) => PACKAGE.exec(id)?.[0].replace(/^\0/, "") ?? []));
      const source = [...folders].map(licenseOf).sort().join("\n\n");
      file = this.getFileName(this.emitFile({ type: "asset", name: "licenses.txt", source }));
    },
    transformIndexHtml: {
      order: "post",
      handler: () => [{ tag: "link", attrs: { rel: "license", href: `/dashboard/${file}` }, injectTo: "head" }],
    },
  };
}

function licenseOf(folder: string): string {
  const { name, version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf-8"));
  const text = readdirSync(folder).find((each) => /^licen[cs]e/i.test(each));
  if (!text || !existsSync(join(folder, text))) {
    throw new Error(`${name} has no licence file`);
  }
  return `${name} ${version} (${license})\n\n${readFileSync(join(folder, text), "utf-8").trim()}`;
}
