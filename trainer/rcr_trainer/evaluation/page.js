"use strict";
// A run: selectors [name, kind, label], structures [name], examples [question, program], and questions
// [id, question, gold program, needed structures, [picks, steps, [answer, exact, Jaccard, same result] or null] each].
// A character of `steps` says which pick (from 1, in base 36) shows a needed structure first; 0: none.
const RUNS = JSON.parse(document.getElementById("data").textContent);
const MOST_CHIPS = 12;
const $ = (id) => document.getElementById(id);
let run, fitting, shown;

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);  // Strings become text nodes: nothing in the data is read as HTML.
  return element;
}

const ours = () => Math.max(0, run.selectors.findIndex(([name]) => name === "rcr"));
const covered = ([, steps]) => steps.length - steps.split("0").length + 1;
const exact = ([, , answer]) => answer !== null && answer[1];

/** Above 0 where one pick is better than the other: by exact match where both were answered, else by coverage. */
function better(one, other) {
  if (one[2] !== null && other[2] !== null) return exact(one) - exact(other);
  return covered(one) - covered(other);
}

function fits(question) {
  const picks = question[4], mine = picks[ours()], rival = $("rival").value;
  const others = picks.filter((_, i) =>
    rival === "any" ? i !== ours() && run.selectors[i][1] === "plain" : i === Number(rival));
  const words = $("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${question[0]} ${question[1]} ${question[2]}`.toLowerCase();
  if (!words.every((word) => text.includes(word))) return false;
  switch ($("filter").value) {
    case "loses": return others.some((other) => better(mine, other) < 0);
    case "wins": return others.length > 0 && others.every((other) => better(mine, other) > 0);
    case "wrong": return picks.some((pick) => pick[2] !== null) && !picks.some(exact);
    case "uncovered": return picks.every((pick) => pick[1].includes("0"));
    case "missing": return mine[1].includes("0");
    default: return true;
  }
}

function badge([, , answer]) {
  if (answer === null) return "";
  return answer[1] ? make("span", "badge good", "✓ exact") : make("span", "badge bad", "✗ not exact");
}

function chips(names, className) {
  const list = (some) => make("div", "chips", ...some.map((name) => make("code", className, name)));
  if (names.length <= MOST_CHIPS) return [list(names)];
  const more = make("details", "", make("summary", "", `${names.length - MOST_CHIPS} more`), list(names.slice(MOST_CHIPS)));
  return [list(names.slice(0, MOST_CHIPS)), more];
}

function card(question, i) {
  const pick = question[4][i], [picks, steps, answer] = pick, [name, , label] = run.selectors[i];
  const box = make("section", i === ours() ? "card ours" : "card",
    make("h4", "", label, badge(pick)),
    make("p", "note", `covers ${covered(pick)} of ${steps.length} structures`));
  const list = make("ol", "");
  picks.forEach((example, t) => {
    const [source, target] = run.examples[example];
    const added = steps.split((t + 1).toString(36)).length - 1;
    list.append(make("li", "", source, make("div", "program", target), make("div", "note", `+${added} structures`)));
  });
  box.append(list);
  if (answer !== null) {
    const scores = [`Jaccard ${(100 * answer[2]).toFixed(0)} %`];
    if (answer[3] !== null) scores.push(answer[3] ? "same result" : "another result");
    box.append(make("p", "", make("strong", "", "Answer")), make("div", "program", answer[0] ?? "(no program)"),
      make("p", "note", scores.join(", ")));
  }
  const missing = question[3].filter((_, j) => steps[j] === "0").map((j) => run.structures[j]);
  if (missing.length) box.append(make("p", "", make("strong", "", `${missing.length} missing`)), ...chips(missing, "bad"));
  else box.append(make("p", "", make("span", "badge good", "nothing missing")));
  box.setAttribute("aria-label", name);
  return box;
}

function matrix(question, columns) {
  const head = make("tr", "", make("th", "", "structure"), ...columns.map((i) => make("th", "", run.selectors[i][0])));
  head.childNodes.forEach((cell) => { cell.scope = "col"; });
  const body = make("tbody", "");
  question[3].forEach((structure, j) => {
    const name = make("th", "", make("code", "", run.structures[structure]));
    name.scope = "row";
    body.append(make("tr", "", name, ...columns.map((i) => {
      const step = question[4][i][1][j];
      return step === "0" ? make("td", "bad", "✗") : make("td", "good", String(parseInt(step, 36)));
    })));
  });
  const table = make("table", "", make("thead", "", head), body);
  const wide = make("div", "wide", table);
  wide.tabIndex = 0;
  wide.setAttribute("role", "region");
  wide.setAttribute("aria-label", "structures by selector");
  const all = make("details", "", make("summary", "", "Which pick shows which structure first"), wide);
  all.id = "structures";
  return all;
}

function showQuestion() {
  const place = $("question"), at = Number($("list").value);
  const kept = $("structures")?.open;
  place.replaceChildren();
  $("previous").disabled = fitting.indexOf(at) <= 0;
  $("next").disabled = fitting.indexOf(at) < 0 || fitting.indexOf(at) === fitting.length - 1;
  if ($("list").selectedIndex < 0) return;
  const question = run.questions[at], columns = [...shown].sort((a, b) => a - b);
  place.append(
    make("h3", "", question[1]), make("p", "note", `question ${question[0]}`),
    make("p", "", make("strong", "", "Gold program")), make("div", "program", question[2]), make("p", ""),
    make("div", "cards", ...columns.map((i) => card(question, i))), matrix(question, columns));
  $("structures").open = Boolean(kept);
}

function showList() {
  const before = $("list").value === "" ? -1 : Number($("list").value);
  fitting = run.questions.flatMap((question, i) => (fits(question) ? [i] : []));
  $("list").replaceChildren(...fitting.map((i) => {
    const question = run.questions[i], mine = question[4][ours()];
    const mark = mine[2] === null ? "" : exact(mine) ? "✓ " : "✗ ";
    const option = make("option", "", `${mark}${covered(mine)}/${mine[1].length}  ${question[1]}`);
    option.value = i;
    return option;
  }));
  $("count").textContent = `${fitting.length} of ${run.questions.length} questions` +
    (fitting.length ? ". ✓ and ✗: ours answered exactly or not; n/m: structures that ours covers." : ".");
  $("list").value = String(fitting.includes(before) ? before : fitting[0] ?? "");
  showQuestion();
}

function showRun() {
  run = RUNS[Number($("run").value)];
  const total = (i) => run.questions.reduce((sum, question) => {
    const pick = question[4][i];
    return sum + (exact(pick) ? 1e6 : 0) + covered(pick) / pick[1].length;
  }, 0);
  const plain = run.selectors.flatMap(([, kind], i) => (kind === "plain" ? [i] : []));
  const best = plain.sort((a, b) => total(b) - total(a)).slice(0, 2);
  shown = new Set([...run.selectors.keys()].filter((i) => run.selectors[i][1] !== "plain" || best.includes(i)));
  $("rival").replaceChildren(...[["any", "any plain selector"], ...run.selectors.map(([name], i) => [i, name])]
    .filter(([i]) => i !== ours()).map(([value, text]) => {
      const option = make("option", "", text);
      option.value = value;
      return option;
    }));
  $("selectors").replaceChildren(...run.selectors.map(([, , label], i) => {
    const box = make("input", "");
    box.type = "checkbox";
    box.checked = shown.has(i);
    box.addEventListener("change", () => { shown[box.checked ? "add" : "delete"](i); showQuestion(); });
    return make("label", "", box, ` ${label}`);
  }));
  $("list").replaceChildren();
  showList();
}

function step(by) {
  const at = fitting.indexOf(Number($("list").value)) + by;
  if (at < 0 || at >= fitting.length) return;
  $("list").value = String(fitting[at]);
  showQuestion();
}

RUNS.forEach(({ name }, i) => {
  const option = make("option", "", name);
  option.value = i;
  $("run").append(option);
});
$("run").addEventListener("change", showRun);
for (const id of ["filter", "rival"]) $(id).addEventListener("change", showList);
$("words").addEventListener("input", showList);
$("list").addEventListener("change", showQuestion);
$("previous").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
showRun();
