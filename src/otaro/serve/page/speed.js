// Tokens a second: of late, and over time.

const SPAN = 1500; // milliseconds that a speed is the mean of
const BARS = 60;

export class Speed {
  constructor(figure, graph) {
    this.figure = figure;
    this.graph = graph;
    this.samples = []; // [milliseconds, tokens, width] of the answer at hand
    this.history = []; // [tokens a second, width], one for every tick
  }

  begin() {
    this.samples = [];
  }

  push(tokens, width) {
    this.samples.push([performance.now(), tokens, width]);
  }

  end(mean) {
    this.samples = [];
    this.figure.textContent = mean ? mean.toFixed(1) : "–";
  }

  tick() {
    const now = performance.now();
    this.samples = this.samples.filter(([time]) => now - time < SPAN);
    if (this.samples.length < 2) return;
    const [first, last] = [this.samples[0], this.samples.at(-1)];
    const speed = (1000 * (last[1] - first[1])) / Math.max(1, last[0] - first[0]);
    this.figure.textContent = speed.toFixed(speed < 10 ? 1 : 0);
    this.history = [...this.history, [speed, last[2]]].slice(-BARS);
    this.draw();
  }

  draw() {
    const top = 1.1 * Math.max(10, ...this.history.map(([speed]) => speed));
    const bars = this.history.map(([speed, width], place) => {
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const height = (54 * speed) / top;
      for (const [key, value] of Object.entries({ x: 4 * place, y: 56 - height, width: 3, height, rx: 1 })) {
        bar.setAttribute(key, value);
      }
      bar.dataset.width = width;
      return bar;
    });
    this.graph.replaceChildren(...bars);
  }
}
