import assert from "node:assert/strict";
import { test } from "node:test";
import { type Place, changedQuery, cleanPrefix, pathOf, placeOf, wholeOf, withoutPrefix, wordOf } from "../src/state/place";

const NAMES = ["a", "math/level 1/ü?#&=%", "..", ".", "%2E", "%2e%2e", "%", "<script>", "a\nb", "\u202e", "+ +"];

test("each place is read back from its path, and from what a browser makes of it", () => {
  for (const name of NAMES) {
    const places: Place[] = [
      { view: "job", namespace: "default", name },
      { view: "group", namespace: "n", name: "j", task: name },
      { view: "rollout", namespace: "n", name: "j", id: name },
    ];
    for (const place of places) {
      assert.deepEqual(placeOf(pathOf(place)), place);
      assert.deepEqual(placeOf(new URL(pathOf(place), "http://host").pathname), place);
    }
  }
});

test("paths that name nothing are unknown", () => {
  for (const path of ["/jobs", "/jobs/default", "/other/a/b", "/jobs/a/b/c/d", "/jobs/a/b/groups", "/jobs/%ff/b", "/jobs/a/b/groups/c/d"]) {
    assert.equal(placeOf(path).view, "unknown", path);
  }
  assert.equal(placeOf("/").view, "overview");
  assert.equal(placeOf("").view, "overview");
});

test("a prefix begins with a slash and is taken off whole", () => {
  assert.equal(cleanPrefix("//x/y/"), "/x/y");
  assert.equal(cleanPrefix("/"), "");
  assert.equal(withoutPrefix("/x/jobs/a/b", "/x"), "/jobs/a/b");
  assert.equal(withoutPrefix("/x", "/x"), "/");
  assert.equal(withoutPrefix("/xy", "/x"), "/xy");
});

test("a query drops what is empty and sorts its names", () => {
  const query = changedQuery(new URLSearchParams("sort=no&a=1"), { a: null, tab: "tokens", search: "", flag: true, z: 0 });
  assert.equal(query.toString(), "flag=1&sort=no&tab=tokens&z=0");
});

test("values of the query are checked", () => {
  const query = new URLSearchParams("n=12&bad=1e9&sort=evil&minus=-3");
  assert.equal(wholeOf(query, "n", 0, 100), 12);
  assert.equal(wholeOf(query, "n", 0, 10), null);
  assert.equal(wholeOf(query, "bad", 0, 1e10), null);
  assert.equal(wholeOf(query, "minus", -5, 0), -3);
  assert.equal(wordOf(query, "sort", ["no", "reward"]), "no");
});
