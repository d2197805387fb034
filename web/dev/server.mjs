/**
 * Serve the page while it is being written. It is not shipped, and it is for this machine only.
 *
 *   node dev/server.mjs                        made-up answers
 *   ROLLYARD_TOKEN=… node dev/server.mjs URL   passes calls on to a control plane, with the token
 *
 * PORT is the port (default: the system chooses one, which is printed), PREFIX a path prefix.
 */
import { createServer, request } from "node:http";
import { readFileSync } from "node:fs";
import { dirname, extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { answer } from "./fake.mjs";

const folder = join(dirname(fileURLToPath(import.meta.url)), "../../api/src/rollyard_api/page");
const upstream = process.argv[2];
const prefix = process.env.PREFIX ?? "";
const TYPES = { ".js": "text/javascript", ".css": "text/css", ".html": "text/html; charset=utf-8" };
const CSP = [
  "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self'", "font-src 'none'",
  "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
].join("; ");

function page(response, path) {
  const asset = path.startsWith("/assets/");
  const file = join(folder, asset ? normalize(path) : "index.html");
  let body = readFileSync(file);
  if (!asset) body = body.toString().replace('content=""', `content="${prefix}"`).replaceAll('"assets/', `"${prefix}/assets/`);
  response.writeHead(200, { "Content-Type": TYPES[extname(file)] ?? "text/plain", "Content-Security-Policy": CSP, "X-Content-Type-Options": "nosniff" });
  response.end(body);
}

function stream(response) {
  response.writeHead(200, { "Content-Type": "text/event-stream", "Cache-Control": "no-store" });
  response.write(": hello\n\n");
  const timer = setInterval(() => response.write(": idle\n\n"), 5000);
  response.on("close", () => clearInterval(timer));
}

function pass(incoming, response, path) {
  const headers = { ...incoming.headers, authorization: `Bearer ${process.env.ROLLYARD_TOKEN ?? ""}` };
  delete headers.cookie;
  delete headers.origin;
  const outgoing = request(new URL(path, upstream), { method: incoming.method, headers }, (reply) => {
    response.writeHead(reply.statusCode ?? 502, reply.headers);
    reply.pipe(response);
  });
  outgoing.on("error", () => response.headersSent || response.writeHead(502).end());
  response.on("close", () => outgoing.destroy());
  incoming.pipe(outgoing);
}

const server = createServer((incoming, response) => {
  const url = new URL(incoming.url, "http://localhost");
  const path = url.pathname.startsWith(prefix) ? url.pathname.slice(prefix.length) : url.pathname;
  try {
    if (!path.startsWith("/v1/")) page(response, path);
    else if (upstream) pass(incoming, response, path + url.search);
    else if (path === "/v1/events") stream(response);
    else {
      const body = incoming.method === "GET" ? answer(path.slice(3), url.searchParams) : null;
      response.writeHead(body === undefined ? 404 : body === null ? 204 : 200, { "Content-Type": "application/json" });
      response.end(body ? JSON.stringify(body) : undefined);
    }
  } catch (error) {
    response.writeHead(500).end(String(error));
  }
});
server.listen(Number(process.env.PORT ?? 0), "127.0.0.1", () => console.log(`http://127.0.0.1:${server.address().port}${prefix}/`));
