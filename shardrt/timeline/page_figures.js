// First part of the page's script: the data, small tools, the figures and the tables.
// The parts run as one function, in strict mode. Everything that comes from files is written with textContent or drawn
// on a canvas, and never becomes markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const ranks = data.ranks;
const KINDS = ["forward", "backward", "step", "update", "reduce", "gather", "other"];
const ROW = 24, GAP = 3, LANE_GAP = 4;
const end = Math.max(1, data.end);
const stepCount = Math.min(...ranks.map((rank) => rank.windows.length));
const state = { first: data.first, last: data.last, a: 0, b: end, hover: null };
let colour = {}, hatch = null;

// ---- small tools
const make = (tag, text, className) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
};
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const ms = (us) => {
  const value = us / 1000;
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 1 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};
const percent = (part) => (part === null ? "–" : `${(100 * part).toFixed(1)} %`);
const bytes = (count) => {
  if (count < 1000) return `${count} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let value = count / 1000, unit = 0;
  while (value >= 1000 && unit < 3) { value /= 1000; unit += 1; }
  return `${value.toPrecision(3)} ${units[unit]}`;
};
const firstEndingAfter = (row, time) => {
  let low = 0, high = row.start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.start[middle] + row.span[middle] <= time) low = middle + 1; else high = middle;
  }
  return low;
};
const firstAfter = (stretches, time) => {
  let low = 0, high = stretches.length;
  while (low < high) { const middle = (low + high) >> 1; if (stretches[middle][1] <= time) low = middle + 1; else high = middle; }
  return low;
};
const overlap = (stretches, from, to) => {
  let low = firstAfter(stretches, from), found = 0;
  for (; low < stretches.length && stretches[low][0] < to; low += 1) {
    found += Math.min(to, stretches[low][1]) - Math.max(from, stretches[low][0]);
  }
  return found;
};

// ---- figures: [duration, communication, reduce, gather, waited, exposed] per step and rank
const sums = (rank, first, last) => {
  const total = [0, 0, 0, 0, 0, 0];
  for (let step = first - 1; step < last; step += 1) rank.figures[step].forEach((value, index) => { total[index] += value; });
  return total;
};
const mean = (total, count) => total.map((value) => value / Math.max(count, 1));
const hiddenShare = (figures) => (figures[1] > 0 ? 1 - figures[5] / figures[1] : null);
const overall = () => ranks.map((rank) => sums(rank, state.first, state.last))
  .reduce((one, other) => one.map((value, index) => value + other[index]));

const meanByStep = Array.from({ length: stepCount }, (_, step) => mean(
  ranks.map((rank) => rank.figures[step]).reduce((one, other) => one.map((value, index) => value + other[index])), ranks.length,
));

const put = (id, text, unit) => {
  byId(id).textContent = text;
  if (unit) byId(id).append(" ", make("small", unit));
};
const showFigures = () => {
  const steps = state.last - state.first + 1;
  const figures = mean(overall(), steps * ranks.length);
  const hidden = hiddenShare(figures);
  const per = data.steps ? "per step" : "in all";
  put("hidden", percent(hidden));
  byId("share-hidden").style.width = hidden === null ? "0" : `${100 * hidden}%`;
  byId("share-exposed").style.width = hidden === null ? "0" : `${100 * (1 - hidden)}%`;
  const range = data.steps ? (steps === 1 ? `step ${state.first}` : `steps ${state.first} to ${state.last}`) : "the whole recording";
  put("share-words", hidden === null ? "no communication was recorded" : `over ${range}, ${ranks.length} rank${ranks.length > 1 ? "s" : ""}`);
  put("duration", ms(figures[0]), "ms");
  put("duration-words", data.steps ? "from step to step" : "from first to last span");
  put("communication", ms(figures[1]), "ms");
  put("communication-words", `${per}: reduce ${ms(figures[2])}, gather ${ms(figures[3])}`);
  put("exposed", ms(figures[5]), "ms");
  put("exposed-words", figures[0] > 0 ? `${per}: ${percent(figures[5] / figures[0])} of the time` : per);
  byId("first").value = state.first;
  byId("last").value = state.last;
  showRankTable(steps);
  showStepTable();
};
const row = (cells, className, header) => {
  const line = make("tr", undefined, className);
  cells.forEach((cell) => {
    const node = make(header ? "th" : "td", cell);
    if (header) node.scope = "col";
    line.append(node);
  });
  return line;
};
const cells = (figures) => [...figures.map(ms), percent(hiddenShare(figures))];
const HEADINGS = ["ms", "communication", "reduce", "gather", "waited", "exposed", "hidden"];
const showRankTable = (steps) => {
  const lines = [row(["rank", "steps", ...HEADINGS], "", true)];
  if (data.steps && state.first > 1) {
    ranks.forEach((rank) => lines.push(row([`${rank.rank}, step 1`, "1", ...cells(sums(rank, 1, 1))], "warm")));
  }
  ranks.forEach((rank) => {
    lines.push(row([String(rank.rank), data.steps ? String(steps) : "–", ...cells(mean(sums(rank, state.first, state.last), steps))]));
  });
  if (ranks.length > 1) lines.push(row(["all", data.steps ? String(steps) : "–", ...cells(mean(overall(), steps * ranks.length))], "all"));
  byId("by-rank").replaceChildren(...lines);
  ranks.forEach((rank) => { rank.part.textContent = `hidden ${percent(hiddenShare(sums(rank, state.first, state.last)))}`; });
};
const MOST_ROWS = 400;
const showStepTable = () => {
  if (!byId("steps-table").open) return;
  const lines = [row(["step", "rank", ...HEADINGS], "", true)];
  for (let step = state.first; step <= state.last && lines.length < MOST_ROWS; step += 1) {
    ranks.forEach((rank) => lines.push(row([String(step), String(rank.rank), ...cells(rank.figures[step - 1])])));
  }
  byId("by-step").replaceChildren(...lines);
};
const showSpanTable = () => {
  if (!byId("spans-table").open) return;
  const found = [];
  ranks.forEach((rank) => rank.rows.concat(rank.waits).forEach((one) => {
    for (let at = firstEndingAfter(one, state.a); at < one.start.length && one.start[at] < state.b && found.length < 20000; at += 1) {
      found.push([one.start[at], rank, one, at]);
    }
  }));
  found.sort((one, other) => one[0] - other[0]);
  const lines = [row(["at, ms", "ms", "rank", "lane", "span", "details"], "", true)];
  lines[0].lastChild.className = "words";
  found.slice(0, MOST_ROWS).forEach(([start, rank, one, at]) => {
    const line = row([ms(start), ms(one.span[at]), String(rank.rank), one.lane, data.names[one.name[at]]]);
    line.append(make("td", detailsOf(one, at).map(([key, value]) => `${key} ${value}`).join(", "), "words"));
    lines.push(line);
  });
  byId("by-span").replaceChildren(...lines);
  byId("spans-words").textContent = found.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${found.length >= 20000 ? "20,000 or more" : found.length}; zoom in for the rest.` : "";
};
const detailsOf = (one, at) => data.details[one.info[at]].map(([key, value]) => {
  if ((key === "bytes" || key === "sent") && typeof value === "number") return [key, bytes(value)];
  return [key === "target" ? "waited for" : key, String(value)];
});
