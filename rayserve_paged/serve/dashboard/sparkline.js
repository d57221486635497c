// A line of the latest values; a gap where there was none.

const LENGTH = 60;

export class Sparkline {
  constructor(canvas, label, format) {
    this.canvas = canvas;
    this.label = label;
    this.format = format;
    this.values = [];
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > LENGTH) this.values.shift();
    this.draw();
  }

  draw() {
    const { canvas, values } = this;
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.strokeStyle = pen.fillStyle = getComputedStyle(canvas).color;
    pen.lineWidth = 2;
    pen.lineJoin = "round";
    const known = values.filter((value) => value !== null);
    const top = Math.max(...known, 0) || 1;
    const x = (index) => width - 3 - (values.length - 1 - index) * ((width - 6) / (LENGTH - 1));
    const y = (value) => height - 4 - (value / top) * (height - 8);
    pen.beginPath();
    let isDown = false;
    values.forEach((value, index) => {
      if (value === null) isDown = false;
      else if (isDown) pen.lineTo(x(index), y(value));
      else {
        pen.moveTo(x(index), y(value));
        isDown = true;
      }
    });
    pen.stroke();
    const last = values[values.length - 1];
    if (last !== null && last !== undefined) {
      pen.beginPath();
      pen.arc(x(values.length - 1), y(last), 3, 0, 7);
      pen.fill();
    }
    const now = last === null || last === undefined ? "none" : this.format(last);
    canvas.setAttribute("aria-label", `${this.label}, last ${values.length} seconds: now ${now}, ` +
      `at most ${known.length ? this.format(Math.max(...known)) : "none"}`);
  }
}
