// The dashboard's page: the list of runs, one connection that follows the chosen runs, and the tokens of one sample.
// Text from runs is inserted with textContent only; the HTML from the server is already escaped.
"use strict";
(() => {
  const colours = ["#0072B2", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#56B4E9"];
  const byId = (id) => document.getElementById(id);
  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const number = (value, digits = 0) =>
    value === null || value === undefined ? "–" : value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  let shown = new URLSearchParams(location.search).getAll("run");
  let source = null;
  let paused = false;
  let frame = null;
  let listed = [];

  const say = (text) => (byId("state").textContent = text);
  const now = () => new Date().toLocaleTimeString("en-GB");

  // ---- the list ------------------------------------------------------------------------------------------------------

  async function list() {
    if (paused) return;
    let answer;
    try {
      answer = await (await fetch("api/runs")).json();
    } catch {
      say("the server does not respond");
      return;
    }
    listed = answer.runs;
    const keys = new Set(listed.map((run) => run.key));
    const kept = shown.filter((key) => keys.has(key));
    if (!kept.length && listed.length) kept.push(listed[0].key);
    if (!listed.length) {
      byId("runs-text").textContent = "No run yet in " + answer.folders.join(", ") + ". A run that starts there will appear here.";
      say("waiting for a run");
    } else {
      byId("runs-text").textContent = "Choose a run to follow, or several to compare.";
    }
    byId("run-rows").replaceChildren(...listed.map(row));
    if (String(kept) !== String(shown) || (!source && kept.length)) show(kept);
    mark();
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
      show(box.checked ? [...rest, run.key] : rest);
    });
    const name = make("span", run.key);
    label.append(box, name);
    head.append(label);
    const state = make("td", run.state === "ended" ? "no summary" : run.state, "left " + (run.state === "running" ? "running" : "other"));
    if (run.problem) head.append(make("div", run.problem, "note"));
    const share = run.total_samples && run.state === "running" ? `${number(run.samples)} of ${number(run.total_samples)}` : number(run.samples);
    line.append(
      head, state, make("td", run.strategy || "–", "left wide"), make("td", share), make("td", number(run.updates), "wide"),
      make("td", number(run.reward, 3), "wide"), make("td", number(run.accuracy, 3), "wide"), make("td", number(run.tokens_per_s), "wide"),
    );
    return line;
  }

  function mark() {
    for (const line of byId("run-rows").children) {
      const isShown = shown.includes(line.dataset.run);
      line.classList.toggle("shown", isShown);
      line.querySelector("input").checked = isShown;
    }
  }

  // ---- following -----------------------------------------------------------------------------------------------------

  function show(keys) {
    shown = keys;
    const query = new URLSearchParams(keys.map((key) => ["run", key]));
    history.replaceState(null, "", keys.length ? "?" + query : location.pathname);
    mark();
    frame = null;
    if (keys.length) follow();
    else {
      stop();
      byId("head").replaceChildren();
      byId("frame").replaceChildren();
      say("choose a run");
    }
  }

  function stop() {
    if (source) source.close();
    source = null;
  }

  function follow() {
    stop();
    if (paused) return;
    say("reading");
    source = new EventSource("api/follow?" + new URLSearchParams(shown.map((key) => ["run", key])));
    source.onmessage = (event) => apply(JSON.parse(event.data));
    source.onerror = () => say(source && source.readyState === EventSource.CLOSED ? "the server refused the connection" : "connection lost, reconnecting");
  }

  function apply(message) {
    if (message.problem) {
      byId("head").replaceChildren(make("p", message.problem, "note"));
      byId("frame").replaceChildren();
      frame = null;
      say("the run cannot be read");
      return;
    }
    if (message.frame === undefined) {
      say(`reading ${Math.round(message.progress * 100)} %`);
      return;
    }
    document.title = message.title + " - sortedrl";
    byId("head").innerHTML = message.head;
    if (message.frame !== frame) {
      frame = message.frame;
      for (const chart of document.querySelectorAll("#frame .js-plotly-plot")) Plotly.purge(chart);
      byId("frame").innerHTML = frame;
    }
    for (const [name, text] of Object.entries(message.captions)) byId("caption-" + name).textContent = text;
    pageCharts.drawAll(message.figures);
    const isLive = listed.some((run) => shown.includes(run.key) && run.state === "running");
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

  // ---- one sample ----------------------------------------------------------------------------------------------------

  async function open(run, sample) {
    byId("sample-title").textContent = `Sample ${sample} of ${run}`;
    byId("sample-body").replaceChildren(make("p", "reading the ledger", "soft"));
    if (!byId("sample").open) byId("sample").showModal();
    const query = new URLSearchParams({ run, sample });
    let found;
    try {
      found = await (await fetch("api/sample?" + query)).json();
    } catch {
      found = { problem: "the server does not respond" };
    }
    byId("sample-body").replaceChildren(...(found.problem ? [make("p", found.problem, "note")] : describe(found)));
  }

  function describe(sample) {
    const facts = `Cohort ${sample.cohort}, ${sample.state}, ${number(sample.num_tokens)} tokens.`;
    const parts = [make("p", facts, "soft"), make("h3", "Prompt"), make("div", sample.prompt, "prompt"), make("h3", "Answer, coloured by version")];
    if (!sample.has_tokens) parts.push(make("p", "The ledger of this run does not store the tokens of trained samples.", "soft"));
    else if (!sample.tokens.length) parts.push(make("p", "The answer has no tokens yet.", "soft"));
    else parts.push(answer(sample.tokens));
    if (sample.is_cut) parts.push(make("p", `The first ${number(sample.tokens.length)} tokens are shown.`, "soft"));
    if (!sample.is_spelled) parts.push(make("p", "Tokens are shown as numbers, because the run has no tokenizer.", "soft"));
    parts.push(make("h3", "History"), historyTable(sample.moments));
    return parts;
  }

  function answer(tokens) {
    const box = make("div", undefined, "answer");
    let last = null;
    tokens.forEach(([text, id, version], position) => {
      const colour = colours[version % colours.length];
      if (version !== last) {
        const tag = make("span", "v" + version, "version");
        tag.style.background = colour + "59";
        box.append(tag);
        last = version;
      }
      const token = make("span", text, "token");
      token.style.background = colour + "59";
      token.title = `token ${position + 1}, number ${id}, version ${version}`;
      box.append(token);
    });
    return box;
  }

  function historyTable(moments) {
    const scroll = make("div", undefined, "scroll");
    const table = make("table");
    const head = make("tr");
    for (const name of ["step", "attempt", "version", "added", "accepted", "discarded", "tokens", "note"]) head.append(make("th", name, name === "note" ? "left" : ""));
    table.append(head);
    for (const moment of moments) {
      const line = make("tr");
      line.append(make("th", moment.step));
      for (const name of ["attempt", "version", "gained", "kept", "thrown", "held"]) line.append(make("td", moment[name] || name === "version" || name === "held" ? number(moment[name]) : ""));
      line.append(make("td", moment.note, "left"));
      table.append(line);
    }
    scroll.append(table);
    return scroll;
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
  byId("close").addEventListener("click", () => byId("sample").close());
  list();
  setInterval(list, 3000);
})();
