// The meanings of the page's words: the causes of reserved bytes that are unused (analyze/fragmentation.py), and the
// rest.

const MEANINGS = {
  "allocated, active, reserved": "Allocated bytes are in blocks that the program holds. Active ones are, too, or were freed while a stream may still use them. Reserved is all that the allocator took from the driver.",
  rounding: "Requests are rounded up: to 512 bytes, and to larger steps with roundup_power2_divisions. Many small tensors packed into one lose less.",
  "unsplit remainder": "A free block was a little larger than the request, and what was left was too small to be used on its own. Sizes that are whole MiB lose less.",
  "held by stream use": "The program freed these blocks, but another stream may still use them (record_stream). They can be reused once that stream has passed that use.",
  "cached in another pool": "Free, but in another pool than the request, such as the pool of a CUDA graph. Pools do not lend each other memory; graphs can share one.",
  "cached on another stream": "Free, but allocated on another stream. A block is only reused on its own stream; empty_cache gives it back to the driver.",
  "cached for other sizes": "Free, but in the other size class: blocks up to 1 MiB and larger ones are kept apart.",
  "cached by another library": "Free, in the memory pool of another library, such as CuPy's. The allocator cannot use it; cupy.get_default_memory_pool().free_all_blocks() gives back the chunks without a live block.",
  "stranded holes": "Free pieces of a segment that still has a live block. A larger request does not fit, and the segment cannot be given back. Expandable segments map memory in pages instead; What to do shows what a replay says they would save.",
  "whole free segments": "Segments without a live block. A request that fits takes them; a larger one makes the allocator take more from the driver first. empty_cache gives them back.",
  "rest of the new segment": "The driver is asked for 2 MiB or more at a time. The next requests take the rest.",
  leak: "A call site that holds more after each step, until the recording ends. A list, a cache or a closure keeps what it returns.",
  limit: "The allocator may be limited to less than the GPU's memory (set_per_process_memory_fraction), or other programs use the rest.",
  need: "Nearly all that is reserved is in use: a better allocator setting would not help. The largest holders are listed.",
  others: "Other processes, or contexts and libraries beside the recorded allocator, hold much of the GPU's memory. End what is not needed, or use another GPU.",
  setting: "The allocator reads its settings (PYTORCH_CUDA_ALLOC_CONF; cudatool's own first CUDATOOL_ALLOC_CONF) as the program starts. What a setting saves was measured by a replay of this recording; where a replay of the recorded settings themselves is more than 2 % off, no setting is recommended.",
  purpose: "What a block is for is inferred from its stack, its size and when it lives; each rule says how sure it is.",
  fragmentation: "The share of the reserved bytes that is not active.",
};

const meaningId = (topic) => `meaning-${topic.replace(/\W+/g, "-")}`;

/** Fill the list of meanings. */
function showMeanings() {
  byId("meanings").replaceChildren(...Object.entries(MEANINGS).flatMap(([topic, text]) => [
    element("dt", { id: meaningId(topic), tabIndex: -1 }, topic), element("dd", {}, text)]));
}

/** Return a link to what a topic means, or plain text where there is no such entry. */
function meaningLink(text, topic) {
  if (!topic || !Object.hasOwn(MEANINGS, topic)) return document.createTextNode(text);
  const button = element("button", { type: "button", className: "link", title: MEANINGS[topic] }, text);
  button.addEventListener("click", () => {
    byId("meanings-box").open = true;
    const target = byId(meaningId(topic));
    target.scrollIntoView({ block: "center" }); // not through the fragment, which holds the page's state
    target.focus();
  });
  return button;
}
