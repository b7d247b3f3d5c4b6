// The server's API: requests, and answers that are streamed.

function headers() {
  const key = document.getElementById("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not ours: a proxy's, perhaps.
  }
  return Object.assign(new Error(message), { status: response.status });
}

export async function api(method, path, body) {
  const response = await fetch(path, { method, headers: headers(), body: body && JSON.stringify(body) });
  if (!response.ok && !(path === "/health" && response.status === 503)) throw await failure(response);
  return response.json();
}

// The chunks of a chat completion, as they come.
export async function* streamChat(body, signal) {
  const request = { method: "POST", headers: headers(), body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await fetch("/v1/chat/completions", request);
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server went away in the middle of the answer");
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
