// The dashboard's page: the list of runs, one connection that follows the chosen runs, and requests for completions.
// Text from runs is inserted with textContent only; the HTML from the server is already escaped.
"use strict";
(() => {
  const { make } = pageCharts;
  const { number } = pageCompletions;
  const byId = (id) => document.getElementById(id);

  let shown = new URLSearchParams(location.search).getAll("run");
  let source = null;
  let paused = false;
  let isEmptied = false; // the reader has unchecked the last run
  let frame = null;
  let listed = [];
  let facts = new Map(); // figures of the shown runs, of the moment that their page shows

  const say = (text) => (byId("state").textContent = text);
  const now = () => new Date().toLocaleTimeString("en-GB");

  // ---- the list ------------------------------------------------------------------------------------------------------

  const COLUMNS = [
    { key: "key", label: "run", isText: true },
    { key: "state", label: "state", isText: true },
    { key: "strategy", label: "strategy", isText: true, isWide: true },
    { key: "reward", label: "reward", digits: 3 },
    { key: "tokens_per_s", label: "tokens/s" },
    { key: "samples", label: "samples", isWide: true },
    { key: "updates", label: "updates", isWide: true },
    { key: "accuracy", label: "accuracy", digits: 3, isWide: true },
    { key: "changed", label: "last change", isWide: true },
  ];
  const order = { key: "changed", isDown: true };

  async function list() {
    if (paused) return;
    let answer;
    try {
      answer = await (await fetch("api/runs")).json();
    } catch {
      say("the server does not respond");
      return;
    }
    if (paused) return; // since the request: a page that is paused keeps what it shows
    listed = answer.runs;
    const keys = new Set(listed.map((run) => run.key));
    const kept = shown.filter((key) => keys.has(key));
    if (!kept.length && listed.length && !isEmptied) kept.push(listed[0].key);
    if (!listed.length) {
      byId("runs-text").textContent = "No run yet in " + answer.folders.join(", ") + ". A run that starts there will appear here.";
      say("waiting for a run");
    } else {
      byId("runs-text").textContent = "Choose a run to follow, or several to compare.";
    }
    fillList();
    if (String(kept) !== String(shown) || (!source && kept.length)) show(kept);
  }

  function fillList() {
    const words = byId("run-search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = byId("run-filter").value;
    const runs = listed
      .map((run) => ({ ...run, ...facts.get(run.key) })) // a shown run has the figures that its page has
      .filter((run) => words.every((word) => `${run.key} ${run.strategy || ""} ${run.state}`.toLowerCase().includes(word)))
      .filter((run) => !wanted || (wanted === "alarm" ? run.alarms.length > 0 : run.state === wanted))
      .sort(compare);
    byId("run-heads").replaceChildren(...COLUMNS.map(headCell));
    byId("run-rows").replaceChildren(...runs.map(row));
    byId("run-count").textContent = runs.length === listed.length ? `${number(runs.length)} runs` : `${number(runs.length)} of ${number(listed.length)} runs`;
    mark();
  }

  function compare(a, b) {
    const [left, right] = [a[order.key], b[order.key]];
    const result = left === right ? 0 : left === null || left === undefined ? -1 : right === null || right === undefined ? 1 : left < right ? -1 : 1;
    return order.isDown ? -result : result;
  }

  function headCell(column) {
    const head = make("th", undefined, (column.isText ? "left" : "") + (column.isWide ? " wide" : ""));
    const button = make("button", column.label, "sort");
    button.type = "button";
    if (order.key === column.key) {
      head.setAttribute("aria-sort", order.isDown ? "descending" : "ascending");
      button.textContent += order.isDown ? " ↓" : " ↑";
    }
    button.addEventListener("click", () => {
      order.isDown = order.key === column.key ? !order.isDown : !column.isText;
      order.key = column.key;
      fillList();
    });
    head.append(button);
    return head;
  }

  function row(run) {
    const line = make("tr");
    line.dataset.run = run.key;
    const head = make("th");
    const label = make("label");
    const box = make("input");
    box.type = "checkbox";
    box.addEventListener("change", () => {
      const rest = shown.filter((key) => key !== run.key);
      isEmptied = !box.checked && !rest.length;
      show(box.checked ? [...rest, run.key] : rest);
    });
    label.append(box, make("span", run.key));
    head.append(label);
    if (run.problem) head.append(make("div", run.problem, "note"));
    for (const alarm of run.alarms) head.append(make("div", alarm, "alarm"));
    line.append(head);
    for (const column of COLUMNS.slice(1)) line.append(cellOf(run, column));
    return line;
  }

  function cellOf(run, column) {
    const className = (column.isText ? "left" : "") + (column.isWide ? " wide" : "");
    switch (column.key) {
      case "state":
        return make("td", run.state === "ended" ? "no summary" : run.state, "left " + (run.state === "running" ? "running" : "other"));
      case "samples": {
        const isOpen = run.total_samples && run.state === "running";
        return make("td", isOpen ? `${number(run.samples)} of ${number(run.total_samples)}` : number(run.samples), className);
      }
      case "changed":
        return make("td", run.changed ? new Date(1000 * run.changed).toLocaleString("en-GB", { dateStyle: "short", timeStyle: "short" }) : "–", className);
      default:
        return make("td", column.isText ? run[column.key] || "–" : number(run[column.key], column.digits || 0), className);
    }
  }

  function mark() {
    for (const line of byId("run-rows").children) {
      const isShown = shown.includes(line.dataset.run);
      line.classList.toggle("shown", isShown);
      line.querySelector("input").checked = isShown;
    }
  }

  byId("run-search").addEventListener("input", fillList);
  byId("run-filter").addEventListener("change", fillList);

  // ---- following -----------------------------------------------------------------------------------------------------

  function show(keys) {
    shown = keys;
    const query = new URLSearchParams(keys.map((key) => ["run", key]));
    history.replaceState(null, "", keys.length ? "?" + query : location.pathname);
    mark();
    frame = null;
    facts = new Map();
    clear();
    if (keys.length) {
      byId("head").replaceChildren(loading(keys)); // at once: figures of other runs must not stand under these names
      follow();
    } else {
      stop();
      say("choose a run");
    }
  }

  function clear() {
    for (const chart of document.querySelectorAll("#frame .js-plotly-plot")) Plotly.purge(chart);
    pageCharts.forget();
    byId("head").replaceChildren();
    byId("frame").replaceChildren();
    pageCharts.showContents();
  }

  function loading(keys) {
    const card = make("section", undefined, "card");
    card.id = "loading";
    card.append(make("h2", "Loading " + keys.join(", ")), make("progress"));
    return card;
  }

  function stop() {
    if (source) source.close();
    source = null;
  }

  function follow() {
    stop();
    if (paused) return;
    say("reading");
    const followed = (source = new EventSource("api/follow?" + new URLSearchParams(shown.map((key) => ["run", key]))));
    source.onmessage = (event) => source === followed && apply(JSON.parse(event.data));
    source.onerror = () => say(source && source.readyState === EventSource.CLOSED ? "the server refused the connection" : "connection lost, reconnecting");
  }

  function apply(message) {
    if (message.problem) {
      clear();
      byId("head").replaceChildren(make("p", message.problem, "note"));
      frame = null;
      say("the run cannot be read");
      return;
    }
    if (message.frame === undefined) {
      const bar = document.querySelector("#loading progress");
      if (bar) bar.value = message.progress;
      say(`reading ${Math.round(message.progress * 100)} %`);
      return;
    }
    document.title = message.title + " - sortedrl";
    document.querySelector("main").dataset.smoothing = message.smoothing;
    byId("head").innerHTML = message.head;
    facts = new Map(message.facts.map((fact, at) => [shown[at], fact]));
    fillList();
    if (message.frame !== frame) {
      frame = message.frame;
      for (const chart of document.querySelectorAll("#frame .js-plotly-plot")) Plotly.purge(chart);
      pageCharts.forget();
      byId("frame").innerHTML = frame;
      pageCharts.showContents();
      listedAt = "";
    }
    for (const [name, text] of Object.entries(message.captions)) byId("caption-" + name).textContent = text;
    pageCharts.drawAll(message.figures);
    showCompletions(message.facts.map((fact) => fact.updates));
    const isLive = message.facts.some((fact) => fact.is_live);
    say(`${isLive ? "following" : "up to date"}, last change ${now()}`);
    document.documentElement.dataset.updates = Number(document.documentElement.dataset.updates || 0) + 1;
  }

  byId("pause").addEventListener("click", () => {
    paused = !paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    byId("pause").textContent = paused ? "Continue" : "Pause";
    if (paused) {
      stop();
      say("paused at " + now() + "; the runs continue");
    } else {
      frame = null;
      list();
      follow();
    }
  });

  // ---- completions ---------------------------------------------------------------------------------------------------

  let listedAt = ""; // the runs and updates whose completions are shown, or asked for
  let isAsking = false;

  // Asks for the completions of the updates that the page shows. While an answer is awaited, later updates wait.
  async function showCompletions(updates) {
    const runs = [...shown];
    const at = JSON.stringify([runs, updates]);
    if (!byId("completions") || at === listedAt || isAsking) return;
    isAsking = true;
    listedAt = at;
    try {
      const answers = await Promise.all(runs.map((run, position) => ask("api/completions", { run, before: updates[position] })));
      const box = byId("completions");
      if (!box || String(runs) !== String(shown)) return;
      const rows = answers.flatMap((answer, position) => (answer.rows || []).map((row) => ({ ...row, run: runs[position] })));
      const problems = answers.map((answer) => answer.problem).filter(Boolean);
      const note = `The samples trained last, up to update ${updates.map((count) => number(count)).join(" and ")}. Click one for its tokens.`;
      pageCompletions.show(box, rows, [note, ...problems].join(" "), (row) => open(row.run, row.sample));
    } finally {
      isAsking = false;
      const latest = shown.map((key) => facts.get(key));
      if (latest.length && latest.every(Boolean)) showCompletions(latest.map((fact) => fact.updates));
    }
  }

  async function ask(address, query) {
    try {
      return await (await fetch(address + "?" + new URLSearchParams(query))).json();
    } catch {
      return { problem: "the server does not respond" };
    }
  }

  async function open(run, sample) {
    const title = `Sample ${sample} of ${run}`;
    pageCompletions.openSample(title, "reading the ledger");
    pageCompletions.openSample(title, await ask("api/sample", { run, sample }));
  }

  document.addEventListener("sample", (event) => {
    const place = Number(event.detail.chart.split("-").pop());
    if (shown[place] !== undefined) open(shown[place], event.detail.sample);
  });
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = byId("number").value.trim();
    if (wanted && shown.length) open(shown[0], wanted);
  });
  pageCharts.showContents();
  list();
  setInterval(list, 3000);
})();
