// One answer: streamed, and shown by the widths it was written at.

import { streamChat } from "./api.js";

// Text that is coloured by the width it was written at, with a mark where that changes.
export class Writer {
  constructor(element) {
    this.element = element;
    this.width = null;
    this.span = null;
  }

  push(text, width) {
    if (!this.span || width !== this.width) {
      if (width) {
        const mark = document.createElement("span");
        mark.className = "pill small";
        mark.dataset.width = width;
        mark.textContent = width;
        this.element.append(mark);
      }
      this.span = document.createElement("span");
      if (width) this.span.dataset.width = width;
      this.span.append("");
      this.element.append(this.span);
      this.width = width;
    }
    this.span.firstChild.appendData(text);
  }
}

// Stream one answer: its text, and a line on how it went.
export async function write({ body, onBegin, onText, onToken, running }) {
  const result = { tokens: 0, reason: null, error: null, widths: [] };
  let first = 0, last = 0;
  try {
    for await (const chunk of streamChat(body, running.controller.signal)) {
      if (running.id !== chunk.id) {
        running.id = chunk.id;
        onBegin?.();
      }
      const { width, tokens } = chunk.otaro ?? {};
      if (width && tokens > result.tokens) {
        first ||= performance.now();
        last = performance.now();
        result.tokens = tokens;
        if (!result.widths.includes(width)) result.widths.push(width);
        onToken?.(tokens, width);
      }
      const choice = chunk.choices[0];
      if (choice?.delta.content) onText(choice.delta.content, width);
      if (choice?.finish_reason) result.reason = choice.finish_reason;
    }
  } catch (error) {
    if (error.name === "AbortError") result.reason = "stopped";
    else result.error = error.message;
  }
  const speed = result.tokens > 1 && last > first ? (1000 * (result.tokens - 1)) / (last - first) : 0;
  result.speed = speed;
  const parts = [`${result.tokens} tokens`, result.widths.join(", "), speed ? `${speed.toFixed(1)} tokens/s` : ""];
  if (result.reason === "stopped") parts.push("stopped");
  if (result.reason === "length") parts.push("cut off by its length");
  if (result.error) parts.push(result.error);
  result.note = parts.filter(Boolean).join(" · ");
  return result;
}
