/**
 * Build the page's bundle, or its tests.
 *
 *   node build.mjs [--out FOLDER]   writes index.html and assets/ (default: the control plane's package)
 *   node build.mjs --tests          compiles tests/ into a temporary folder and runs them with node
 *
 * The same sources and the same locked packages give the same bytes on every machine: nothing of the machine,
 * its paths or its clock enters the bundle.
 */
import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync, mkdirSync, writeFileSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const option = process.argv.indexOf("--out");
const out = option > 0 ? resolve(process.argv[option + 1]) : resolve(here, "../api/src/rollyard_api/page");

const shared = {
  absWorkingDir: here,
  bundle: true,
  charset: "utf8",
  jsx: "automatic",
  jsxImportSource: "preact",
  logLevel: "warning",
  target: ["es2022"],
};

async function page() {
  rmSync(join(out, "assets"), { recursive: true, force: true });
  mkdirSync(join(out, "assets"), { recursive: true });
  const result = await build({
    ...shared,
    entryPoints: { app: "src/main.tsx", icon: "src/icon.svg" },
    loader: { ".svg": "copy" },
    outdir: join(out, "assets"),
    entryNames: "[name]-[hash]",
    format: "esm",
    legalComments: "none",
    metafile: true,
    minify: true,
  });
  const names = Object.keys(result.metafile.outputs).map((path) => basename(path));
  const script = names.find((name) => name.endsWith(".js"));
  const sheet = names.find((name) => name.endsWith(".css"));
  const icon = names.find((name) => name.endsWith(".svg"));
  const html = readFileSync(join(here, "src/index.html"), "utf8")
    .replace("{{script}}", `assets/${script}`)
    .replace("{{sheet}}", `assets/${sheet}`)
    .replace("{{icon}}", `assets/${icon}`);
  writeFileSync(join(out, "index.html"), html);
}

async function tests() {
  const folder = mkdtempSync(join(tmpdir(), "rollyard-page-tests-"));
  try {
    const names = readdirSync(join(here, "tests")).filter((name) => name.endsWith(".test.ts"));
    await build({
      ...shared,
      entryPoints: names.map((name) => `tests/${name}`),
      outdir: folder,
      outExtension: { ".js": ".mjs" },
      format: "esm",
      platform: "node",
    });
    const paths = names.map((name) => join(folder, name.replace(/\.ts$/, ".mjs")));
    process.exitCode = spawnSync(process.execPath, ["--test", "--test-reporter=dot", ...paths], { stdio: "inherit" }).status ?? 1;
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

await (process.argv.includes("--tests") ? tests() : page());
