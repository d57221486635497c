// The map of one replica: cells on a canvas, and one element that has the focus among them.

export const NAMES = { ".": "free", "#": "held", "=": "shared", "o": "cached", "p": "pinned" };

// Each state has a shape of its own: outline, square, two bars, ring, diamond.
export function drawCell(pen, state, x, y, size) {
  const gap = size > 12 ? 2 : 1;
  const side = size - gap;
  switch (state) {
    case ".":
      pen.lineWidth = 1;
      pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      break;
    case "#":
      pen.fillRect(x, y, side, side);
      break;
    case "=": {
      const bar = Math.max(2, Math.floor(side * 0.36));
      pen.fillRect(x, y, side, bar);
      pen.fillRect(x, y + side - bar, side, bar);
      break;
    }
    case "o":
      pen.lineWidth = Math.max(1.5, side / 6);
      pen.beginPath();
      pen.arc(x + side / 2, y + side / 2, side / 2 - pen.lineWidth / 2, 0, 7);
      pen.stroke();
      break;
    case "p":
      pen.beginPath();
      pen.moveTo(x + side / 2, y);
      pen.lineTo(x + side, y + side / 2);
      pen.lineTo(x + side / 2, y + side);
      pen.lineTo(x, y + side / 2);
      pen.fill();
      break;
  }
}

export function colours() {
  const found = {};
  for (const swatch of document.querySelectorAll("#legend canvas")) {
    found[swatch.dataset.state] = getComputedStyle(swatch).color;
  }
  return found;
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

export class BlockMap {
  // readCell(replica, cell) resolves to the cell's holders.
  constructor(replica, readCell) {
    this.replica = replica;
    this.readCell = readCell;
    this.state = null;
    this.active = 0; // Where the focus is, or was last.
    this.shown = null; // The cell that is described.
    this.answer = null;
    this.asked = 0;
    this.root = make("article", "replica");
    this.title = make("h3");
    this.facts = make("p", "facts");
    this.grid = make("div", "map");
    this.grid.setAttribute("role", "grid");
    this.grid.setAttribute("aria-describedby", "map-help");
    this.canvas = make("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.row = make("div");
    this.row.setAttribute("role", "row");
    this.cursor = make("div", "cursor");
    this.cursor.setAttribute("role", "gridcell");
    this.cursor.tabIndex = 0;
    this.row.append(this.cursor);
    this.grid.append(this.canvas, this.row);
    this.detail = make("div", "detail");
    this.detail.setAttribute("aria-live", "polite");
    this.detail.append(make("p", "quiet", "No block is chosen."));
    this.root.append(this.title, this.facts, this.grid, this.detail);
    this.cursor.addEventListener("keydown", (event) => this.key(event));
    this.cursor.addEventListener("focus", () => this.choose(this.active));
    this.grid.addEventListener("pointermove", (event) => this.point(event));
    this.grid.addEventListener("click", (event) => {
      this.point(event);
      this.cursor.focus({ preventScroll: true });
    });
    this.grid.addEventListener("pointerleave", () => this.cursor.classList.remove("hover"));
    new ResizeObserver(() => this.draw()).observe(this.grid);
  }

  update(state) {
    this.state = state;
    this.title.textContent = `${state.replica} · life ${state.incarnation}`;
    const counts = Object.entries(state.counts).map(([name, n]) => `${n.toLocaleString("en")} ${name}`);
    const each = state.blocks_per_cell;
    this.facts.textContent = `${plural(state.num_blocks, "block")}: ${counts.join(", ")}. ` +
      `${state.num_running} running, ${state.num_waiting} waiting.` +
      (each > 1 ? ` One cell stands for ${each} blocks and shows the state of most.` : "");
    this.grid.setAttribute("aria-label", `Blocks of ${state.replica}`);
    this.active = Math.min(this.active, Math.max(0, state.cells.length - 1));
    this.root.classList.toggle("wide", state.cells.length > 1200);
    this.draw();
    if (this.shown !== null && (this.cursor.matches(":focus") || this.cursor.classList.contains("hover"))) {
      this.ask(this.active);
    }
  }

  draw() {
    const cells = this.state?.cells;
    const width = this.grid.clientWidth;
    if (!cells || !width) return;
    const wanted = cells.length <= 300 ? 22 : cells.length <= 1200 ? 14 : 10;
    this.size = width < 480 ? Math.max(8, wanted - 3) : wanted;
    this.columns = Math.max(1, Math.floor(width / this.size));
    const rows = Math.ceil(cells.length / this.columns);
    const ratio = devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = rows * this.size * ratio;
    this.canvas.style.height = `${rows * this.size}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const palette = colours();
    for (const state of Object.keys(NAMES)) {
      pen.fillStyle = pen.strokeStyle = palette[state];
      for (let index = cells.indexOf(state); index >= 0; index = cells.indexOf(state, index + 1)) {
        drawCell(pen, state, (index % this.columns) * this.size, Math.floor(index / this.columns) * this.size, this.size);
      }
    }
    this.grid.setAttribute("aria-rowcount", rows);
    this.grid.setAttribute("aria-colcount", this.columns);
    this.place();
  }

  place() {
    const column = this.active % this.columns, row = Math.floor(this.active / this.columns);
    const { style } = this.cursor;
    style.left = `${column * this.size}px`;
    style.top = `${row * this.size}px`;
    style.width = style.height = `${this.size - 1}px`;
    this.row.setAttribute("aria-rowindex", row + 1);
    this.cursor.setAttribute("aria-colindex", column + 1);
    this.cursor.setAttribute("aria-label", this.describe(this.active));
  }

  describe(index) {
    const each = this.state.blocks_per_cell, first = index * each;
    const last = Math.min(first + each, this.state.num_blocks) - 1;
    const what = first === last ? `Block ${first}` : `Blocks ${first} to ${last}, mostly`;
    const heading = `${what} ${NAMES[this.state.cells[index]] ?? ""}`;
    const names = this.answer?.cell === index
      ? this.answer.holders.slice(0, 4).map((holder) => holder.name).join(", ") : "";
    return names ? `${heading}, by ${names}` : heading;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.state) return;
    const last = this.state.cells.length - 1;
    const page = this.columns * 8;
    const steps = {
      ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns,
      PageDown: page, PageUp: -page, Home: -this.active, End: last - this.active,
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const next = this.active + steps[event.key];
    const isRow = event.key === "ArrowDown" || event.key === "ArrowUp";
    if (isRow && (next < 0 || next > last)) return;
    this.choose(Math.max(0, Math.min(last, next)));
    this.cursor.scrollIntoView({ block: "nearest" });
  }

  point(event) {
    if (!this.state) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const index = Math.floor((event.clientY - box.top) / this.size) * this.columns + column;
    if (column < 0 || column >= this.columns || index < 0 || index >= this.state.cells.length) return;
    this.cursor.classList.add("hover");
    if (index !== this.shown || this.active !== index) this.choose(index);
  }

  choose(index) {
    this.active = index;
    this.place();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(index), 60);
  }

  async ask(index) {
    this.shown = index;
    const number = ++this.asked;
    let answer = null;
    try {
      answer = await this.readCell(this.replica, index);
    } catch {
      answer = null;
    }
    if (number !== this.asked) return;
    this.answer = answer;
    this.place();
    this.tell(index, answer);
  }

  tell(index, answer) {
    const content = [];
    if (answer === null) content.push(make("p", "", `${this.describe(index)}: who holds it is not known now.`));
    else {
      const counts = Object.entries(answer.counts).filter(([, n]) => n).map(([name, n]) => `${n} ${name}`);
      const first = answer.first_block, last = first + answer.num_blocks - 1;
      content.push(make("p", "", first === last
        ? `Block ${first}: ${counts.map((each) => each.slice(2)).join("")}`
        : `Blocks ${first} to ${last}: ${counts.join(", ")}`));
      if (!answer.holders.length) content.push(make("p", "quiet", "Nobody holds " + (first === last ? "it." : "them.")));
      const list = make("ul");
      list.setAttribute("aria-label", "Holders");
      for (const holder of answer.holders) {
        const parts = [holder.kind === "pin" && holder.is_own ? `pin ${holder.name}` : holder.name];
        if (holder.sibling) parts.push(`sample ${holder.sibling}`);
        if (first !== last) parts.push(plural(holder.num_blocks, "block"));
        if (holder.layer_groups.some((group) => group > 0)) parts.push(`layer group ${holder.layer_groups.join(", ")}`);
        list.append(make("li", holder.is_own || holder.kind === "step" ? "" : "other", parts.join(" · ")));
      }
      if (answer.num_more_holders) list.append(make("li", "other", `and ${answer.num_more_holders} more`));
      if (list.children.length) content.push(list);
    }
    const text = content.map((element) => element.textContent).join("|");
    // Said again only where it has changed.
    if (text !== this.said) this.detail.replaceChildren(...content);
    this.said = text;
  }
}
