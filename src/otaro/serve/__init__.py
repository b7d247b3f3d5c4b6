"""`otaro serve`: a packed model behind an API that every OpenAI client speaks, and a page to talk to it.

guard        what a request must have before anything of it is read: size, key, origin
openai       what the bodies of requests may hold
problems     what is answered where something is wrong
queue        whose turn it is
control      at which precision
answer, logprobs, writing    an answer while it is made: tokens to text, text to JSON and events
service      all that a request goes through, and what goes on beside; mailbox brings it tokens
chat, completions, status, static    the routes; the page's files are in page/
app          all of it put together
listening, server    the process: its socket, its signals, its end
"""
