// The table of completions, and one sample with its tokens, for both report and dashboard.
// Text from runs is inserted with textContent only. This script makes no requests.
"use strict";
const pageCompletions = (() => {
  const { make } = pageCharts;
  const COLOURS = ["#0072B2", "#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#F0E442"]; // neighbours differ, also the last and the first
  const PAGE = 25;
  const number = (value, digits = 0) =>
    value === null || value === undefined ? "–" : value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  // ---- the table -----------------------------------------------------------------------------------------------------

  const COLUMNS = [
    { key: "sample", label: "sample" },
    { key: "run", label: "run", isText: true },
    { key: "reward", label: "reward", digits: 3 },
    { key: "length", label: "tokens" },
    { key: "prompt", label: "prompt", isText: true },
    { key: "answer", label: "answer", isText: true },
    { key: "staleness", label: "staleness" },
    { key: "turns", label: "turns" },
    { key: "update", label: "update" },
  ];
  // What the reader chose; it stays when new completions arrive.
  const choice = { words: "", key: "update", isDown: true, limit: PAGE };
  let rows = [];
  let open = () => {};
  let isSeveral = false;

  // Shows rows of one or several runs; each row has the name of its run, and `onOpen(row)` is called for a click.
  function show(box, found, note, onOpen) {
    rows = found;
    open = onOpen;
    isSeveral = new Set(rows.map((row) => row.run)).size > 1;
    if (!box.firstChild) box.append(...frame());
    box.querySelector(".soft").textContent = note;
    fill(box);
  }

  function frame() {
    const search = make("input");
    search.type = "search";
    search.placeholder = "search prompts and answers";
    search.setAttribute("aria-label", "search completions");
    search.value = choice.words;
    search.addEventListener("input", () => {
      choice.words = search.value;
      choice.limit = PAGE;
      fill(search.closest("#completions"));
    });
    const line = make("div", undefined, "find");
    line.append(search, make("span", "", "count"));
    const scroll = make("div", undefined, "scroll");
    const table = make("table", undefined, "completions");
    table.append(make("thead"), make("tbody"));
    scroll.append(table);
    const more = make("button", "Show more", "more");
    more.type = "button";
    more.addEventListener("click", () => {
      choice.limit += 4 * PAGE;
      fill(more.closest("#completions"));
    });
    return [make("p", "", "soft"), line, scroll, more];
  }

  const matches = (row, words) =>
    words.every((word) => [row.prompt, row.answer, row.run, String(row.sample), row.ending].some((text) => text && text.toLowerCase().includes(word)));

  function compare(a, b) {
    const [left, right] = [a[choice.key], b[choice.key]];
    const order = left === right ? 0 : left === null || left === undefined ? -1 : right === null || right === undefined ? 1 : left < right ? -1 : 1;
    return choice.isDown ? -order : order;
  }

  function fill(box) {
    const words = choice.words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => matches(row, words)).sort(compare);
    const columns = COLUMNS.filter((column) => column.key !== "run" || isSeveral);
    const head = make("tr");
    for (const column of columns) head.append(headCell(box, column));
    box.querySelector("thead").replaceChildren(head);
    box.querySelector("tbody").replaceChildren(...found.slice(0, choice.limit).map((row) => line(row, columns)));
    box.querySelector(".count").textContent = found.length === rows.length ? `${number(rows.length)} completions` : `${number(found.length)} of ${number(rows.length)}`;
    box.querySelector(".more").hidden = found.length <= choice.limit;
  }

  function headCell(box, column) {
    const head = make("th", undefined, column.isText ? "left" : "");
    const button = make("button", column.label, "sort");
    button.type = "button";
    if (choice.key === column.key) {
      head.setAttribute("aria-sort", choice.isDown ? "descending" : "ascending");
      button.textContent += choice.isDown ? " ↓" : " ↑";
    }
    button.addEventListener("click", () => {
      choice.isDown = choice.key === column.key ? !choice.isDown : !column.isText;
      choice.key = column.key;
      fill(box);
    });
    head.append(button);
    return head;
  }

  function line(row, columns) {
    const element = make("tr");
    for (const column of columns) {
      const value = row[column.key];
      if (column.key === "sample") {
        const head = make("th");
        const button = make("button", String(value), "link");
        button.type = "button";
        head.append(button);
        element.append(head);
      } else if (column.isText) {
        const cell = make("td", undefined, column.key === "run" ? "left" : "left text");
        cell.append(make("div", value || "–"));
        element.append(cell);
      } else {
        const cell = make("td", column.digits ? number(value, column.digits) : number(value));
        if (column.key === "length" && row.ending === "length") {
          cell.textContent += " ✂";
          cell.title = "truncated: it reached the token limit";
        }
        element.append(cell);
      }
    }
    element.addEventListener("click", () => open(row));
    return element;
  }

  // ---- one sample ----------------------------------------------------------------------------------------------------

  let byLogprob = false;

  function dialog() {
    let box = document.getElementById("sample");
    if (box) return box;
    box = make("dialog");
    box.id = "sample";
    box.setAttribute("aria-labelledby", "sample-title");
    const head = make("div", undefined, "dialog-head");
    const title = make("h2", "Sample");
    title.id = "sample-title";
    const close = make("button", "Close");
    close.type = "button";
    close.addEventListener("click", () => box.close());
    head.append(title, close);
    const body = make("div");
    body.id = "sample-body";
    box.append(head, body);
    box.addEventListener("click", (event) => event.target === box && box.close());
    document.body.append(box);
    return box;
  }

  // Opens the dialog with a message, or with a sample as the server describes it.
  function openSample(title, sample) {
    const box = dialog();
    document.getElementById("sample-title").textContent = title;
    const parts = typeof sample === "string" ? [make("p", sample, "soft")] : sample.problem ? [make("p", sample.problem, "note")] : describe(sample);
    document.getElementById("sample-body").replaceChildren(...parts);
    if (!box.open) box.showModal();
  }

  function describe(sample) {
    const facts = `Cohort ${sample.cohort}, ${sample.state}, ${number(sample.num_tokens)} tokens.`;
    const parts = [make("p", facts, "soft"), make("h3", "Prompt"), make("div", sample.prompt, "prompt")];
    const title = make("h3", "Answer");
    parts.push(title);
    if (!sample.has_tokens) parts.push(make("p", "The ledger of this run does not store the tokens of trained samples.", "soft"));
    else if (!sample.tokens.length) parts.push(make("p", "The answer has no tokens yet.", "soft"));
    else parts.push(...answer(sample.tokens));
    if (sample.is_cut) parts.push(make("p", `The first ${number(sample.tokens.length)} tokens are shown.`, "soft"));
    if (!sample.is_spelled) parts.push(make("p", "Tokens are shown as numbers, because the run has no tokenizer.", "soft"));
    parts.push(make("h3", "History"), historyTable(sample.moments));
    return parts;
  }

  function answer(tokens) {
    const box = make("div", undefined, "answer");
    const hint = make("p", undefined, "soft");
    const views = make("div", undefined, "views");
    const hasFed = tokens.some((data) => isFed(data));
    const colour = () => {
      box.replaceChildren(...(byLogprob ? byProbability(tokens) : byVersion(tokens)));
      hint.textContent = byLogprob
        ? "The stronger the colour, the less likely the token was when it was sampled."
        : "The colour is the version that wrote the token, or verified it last; v and its number say where it changes.";
      if (hasFed) hint.textContent += " Striped: not sampled, but put into the answer.";
      [...views.children].forEach((button, at) => button.setAttribute("aria-pressed", String(byLogprob === (at === 1))));
    };
    ["colour by version", "colour by log-prob"].forEach((label, at) => {
      const button = make("button", label);
      button.type = "button";
      button.addEventListener("click", () => {
        byLogprob = at === 1;
        colour();
      });
      views.append(button);
    });
    colour();
    return [views, box, hint];
  }

  const isFed = ([, , , logprob]) => logprob === null || logprob === undefined;

  function token(data, position) {
    const [text, id, version, logprob] = data;
    const element = make("span", text, isFed(data) ? "token fed" : "token");
    const chance = isFed(data) ? "not sampled" : `log-prob ${logprob} (${number(100 * Math.exp(logprob), 1)} %)`;
    element.title = `token ${position + 1}, number ${id}, version ${version}, ${chance}`;
    return element;
  }

  function byVersion(tokens) {
    let last = null;
    return tokens.flatMap((data, position) => {
      const version = data[2];
      const colour = COLOURS[version % COLOURS.length] + "59";
      const parts = [];
      if (version !== last) {
        const tag = make("span", "v" + version, "version");
        tag.style.background = colour;
        parts.push(tag);
        last = version;
      }
      const element = token(data, position);
      element.style.backgroundColor = colour;
      return [...parts, element];
    });
  }

  function byProbability(tokens) {
    return tokens.map((data, position) => {
      const element = token(data, position);
      if (!isFed(data)) element.style.background = `rgb(213 94 0 / ${Math.round(Math.min(-data[3] / 5, 1) * 75)}%)`; // full at 1 in 150
      return element;
    });
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

  // ---- in a report ---------------------------------------------------------------------------------------------------

  // A report contains its completions; the samples that it has no room for are shown without tokens.
  function showEmbedded(runs) {
    const box = document.getElementById("completions");
    if (!box) return;
    const found = runs.flatMap((run, at) => run.rows.map((row) => ({ ...row, run: run.name, at })));
    const problems = runs.filter((run) => run.problem).map((run) => `${run.name}: ${run.problem}`);
    const note = ["The samples trained last. Click one for its tokens.", ...problems].join(" ");
    show(box, found, note, (row) => openEmbedded(runs, row));
    document.addEventListener("sample", (event) => {
      const at = Number(event.detail.chart.split("-").pop());
      const known = runs[at] && runs[at].samples[event.detail.sample];
      if (known) openSample(`Sample ${event.detail.sample} of ${runs[at].name}`, known);
    });
  }

  function openEmbedded(runs, row) {
    const title = `Sample ${row.sample} of ${row.run}`;
    const known = runs[row.at].samples[row.sample];
    openSample(title, known || "");
    if (known) return;
    const text = "This report has no room for the tokens of this sample: open it in the dashboard.";
    const parts = [make("p", text, "soft"), make("h3", "Prompt"), make("div", row.prompt, "prompt")];
    if (row.answer !== null) parts.push(make("h3", "Answer"), make("div", row.answer, "answer"));
    document.getElementById("sample-body").replaceChildren(...parts);
  }

  return { show, openSample, showEmbedded, number };
})();
const embeddedInPage = document.getElementById("embedded");
if (embeddedInPage) pageCompletions.showEmbedded(JSON.parse(embeddedInPage.textContent));
