// What the page knows of every task: its fields, the request that they make, and the view of its
// answer. A new task needs an entry here, and a view if none of these fits.

import {Answers} from "./views/answers.js";
import {Bars} from "./views/bars.js";
import {Entities} from "./views/entities.js";
import {Masks} from "./views/masks.js";
import {Ranked} from "./views/ranked.js";
import {Scores} from "./views/scores.js";
import {Vectors} from "./views/vectors.js";
import {Weights} from "./views/weights.js";
import {fixed, lines, percent} from "./texts.js";
import {html} from "./vendor/htm-preact.js";

const TEXT = {name: "text", label: "Text", rows: 4};
const PAIR = {name: "text_pair", label: "Second text", rows: 2, isOptional: true};
const LABELS = {name: "candidate_labels", label: "Labels", rows: 3, isList: true};

const CUT = {name: "cut", label: "Cut texts that are too long", isFlag: true};

const single = ({text, text_pair}) => text_pair ? {text, text_pair} : text;

/** Texts as the server names them where it cuts one: {place, name, text}. */
const named = (place, name, text) => ({place: `0.${place}`, name, text});
const listed = (placeOf, name, texts) =>
  texts.map((text, index) => ({place: placeOf(index), name: `${name} ${index + 1}`, text}));
const one = ({text}) => [named("text", "Text", text)];
const pair = ({text, text_pair}) => [
  named("text", "Text", text), ...text_pair ? [named("text_pair", "Second text", text_pair)] : [],
];

/** A list of label and score, best first; models that decide by thresholds order it themselves. */
function labelRows(answer) {
  const rows = answer.map(({label, score, assigned}) => (
    {label, share: score, shown: assigned ? `✓ ${percent(score)}` : undefined}));
  return decides(answer) ? rows : rows.sort((a, b) => b.share - a.share);
}
const decides = answer => answer.some(({assigned}) => assigned !== undefined);
const assignsNone = answer => decides(answer) && !answer.some(({assigned}) => assigned);

/** Two sentences, the likelier first, with how likely each is if it must be one of the two. */
function likelierFirst({sentence_good, sentence_bad}, {score_good, score_bad}) {
  const share = 1 / (1 + Math.exp(score_bad - score_good));
  const rows = [
    {label: sentence_good, share, shown: `${fixed(score_good, 2)} nats`},
    {label: sentence_bad, share: 1 - share, shown: `${fixed(score_bad, 2)} nats`},
  ];
  return score_good > score_bad ? rows : rows.reverse();
}

export const TASKS = {
  "text-classification": {
    title: "Text classification",
    cutBy: "truncation",
    fields: [TEXT, PAIR],
    request: values => ({body: {inputs: single(values)}}),
    python: values => values.text_pair ? null : ["text_classification", values.text],
    texts: pair,
    view: ({answer}) => html`
      ${assignsNone(answer[0]) && html`
        <p class="note">The model assigns no label: no score is high enough.</p>`}
      <${Bars} rows=${labelRows(answer[0])} />`,
  },
  "relation-classification": {
    title: "Relation classification",
    cutBy: "truncation",
    fields: [TEXT],
    request: ({text}) => ({body: {inputs: [text]}}),
    python: ({text}) => ["text_classification", text],
    texts: one,
    view: ({answer}) => html`<${Bars} rows=${labelRows(answer[0])} />`,
  },
  "text-regression": {
    title: "Text regression",
    cutBy: "truncation",
    fields: [{...TEXT, label: "Texts", isList: true}, PAIR],
    request: ({text, text_pair}) => ({
      body: {inputs: text_pair ? [{text, text_pair}] : lines(text)},
    }),
    texts: values => values.text_pair
      ? pair(values) : listed(index => `${index}.text`, "Text", lines(values.text)),
    view: Scores,
  },
  "token-classification": {
    title: "Token classification",
    fields: [TEXT],
    request: ({text}) => ({body: {inputs: text}}),
    python: ({text}) => ["token_classification", text],
    texts: one,
    view: Entities,
  },
  "span-classification": {
    title: "Span classification",
    fields: [TEXT],
    request: ({text}) => ({body: {inputs: text}}),
    python: ({text}) => ["token_classification", text],
    texts: one,
    view: Entities,
  },
  "question-answering": {
    title: "Question answering",
    fields: [
      {name: "question", label: "Question", rows: 1},
      {name: "context", label: "Passage", rows: 6},
    ],
    request: ({question, context}) => ({
      body: {inputs: {question, context}, parameters: {top_k: 5}},
    }),
    python: ({question, context}) => ["question_answering", {question, context, top_k: 5}],
    texts: ({question, context}) => [
      named("question", "Question", question), named("context", "Passage", context),
    ],
    view: Answers,
  },
  "fill-mask": {
    title: "Fill mask",
    cutBy: "truncation",
    fields: [{...TEXT, insert: "[MASK]"}],
    request: ({text}) => ({body: {inputs: text}}),
    python: ({text}) => ["fill_mask", text],
    texts: one,
    view: Masks,
  },
  "feature-extraction": {
    title: "Feature extraction",
    cutBy: "truncate",
    fields: [
      {name: "query", label: "Find the nearest to", rows: 1, isOptional: true},
      {name: "texts", label: "Texts", rows: 6, isList: true},
    ],
    initial: example => ({
      query: "Where is the text?",
      texts: [onOneLine(textIn(example)), "The weather is fine today.", "It rained all night."].join("\n"),
    }),
    request: ({query, texts}) => ({body: {inputs: [...lines(query), ...lines(texts)]}}),
    python: ({query, texts}) => ["feature_extraction", [...lines(query), ...lines(texts)]],
    openai: ({query, texts}) => [...lines(query), ...lines(texts)],
    texts: ({query, texts}) => listed(
      index => `${index}.text`, "Text", [...lines(query), ...lines(texts)]),
    view: Vectors,
  },
  "sentence-similarity": {
    title: "Sentence similarity",
    cutBy: "truncate",
    fields: [
      {name: "source_sentence", label: "Sentence", rows: 1},
      {name: "sentences", label: "Compared with", rows: 5, isList: true},
    ],
    initial: example => ({
      source_sentence: textIn(example),
      sentences: ["The weather is fine today.", "It rained all night."].join("\n"),
    }),
    request: ({source_sentence, sentences}) => ({
      body: {inputs: {source_sentence, sentences: lines(sentences)}},
    }),
    python: ({source_sentence, sentences}) => [
      "sentence_similarity", source_sentence, {other_sentences: lines(sentences)},
    ],
    texts: ({source_sentence, sentences}) => [
      named("source_sentence", "Sentence", source_sentence),
      ...listed(index => `0.sentences[${index}]`, "Sentence", lines(sentences)),
    ],
    view: ({values, answer}) => Ranked({
      texts: lines(values.sentences),
      scores: answer.map((score, index) => ({index, score})),
    }),
  },
  "zero-shot-classification": {
    title: "Zero-shot classification",
    cutBy: "truncation",
    fields: [TEXT, LABELS, {name: "multi_label", label: "Several labels may apply", isFlag: true}],
    initial: example => ({text: textIn(example), candidate_labels: "good\nbad"}),
    request: ({text, candidate_labels, multi_label}) => ({
      body: {
        inputs: text,
        parameters: {candidate_labels: lines(candidate_labels), multi_label: Boolean(multi_label)},
      },
    }),
    python: ({text, candidate_labels, multi_label}) => [
      "zero_shot_classification", text,
      {candidate_labels: lines(candidate_labels), multi_label: Boolean(multi_label)},
    ],
    texts: one,
    view: ({answer}) => Bars({rows: labelRows(answer)}),
  },
  "text-ranking": {
    title: "Text ranking",
    cutBy: "truncation",
    fields: [
      {name: "text", label: "Query", rows: 1},
      {name: "text_pair", label: "Passages", rows: 6, isList: true},
    ],
    initial: example => ({
      text: textIn(example),
      text_pair: [onOneLine(example.text_pair ?? "Call sorted on the list."),
        "A list holds objects in order.", "The json module reads a string."].join("\n"),
    }),
    request: ({text, text_pair}) => ({
      path: "/rerank", body: {query: text, texts: lines(text_pair)},
    }),
    texts: ({text, text_pair}) => [
      named("text", "Query", text),
      ...listed(index => `${index}.text_pair`, "Passage", lines(text_pair)),
    ],
    view: ({values, answer}) => Ranked({texts: lines(values.text_pair), scores: answer}),
  },
  "sparse-embedding": {
    title: "Sparse embedding",
    cutBy: "truncate",
    fields: [TEXT],
    request: ({text}) => ({body: {inputs: text, parameters: {top_k: 50}}}),
    texts: one,
    view: Weights,
  },
  "multiple-choice": {
    title: "Multiple choice",
    cutBy: "truncation",
    fields: [TEXT, {name: "choices", label: "Choices", rows: 4, isList: true}],
    request: ({text, choices}) => ({body: {inputs: {text, choices: lines(choices)}}}),
    texts: ({text, choices}) => [
      named("text", "Text", text),
      ...listed(index => `0.choices[${index}]`, "Choice", lines(choices)),
    ],
    view: ({answer}) => Bars({
      rows: answer[0].map(({choice, score}) => ({label: choice, share: score})),
    }),
  },
  "next-sentence-prediction": {
    title: "Next sentence",
    cutBy: "truncation",
    fields: [{...TEXT, label: "Sentence", rows: 2}, {...PAIR, label: "Next sentence", isOptional: false}],
    request: ({text, text_pair}) => ({body: {inputs: {text, text_pair}}}),
    texts: pair,
    view: ({answer}) => Bars({rows: labelRows(answer[0])}),
  },
  "minimal-pairs": {
    title: "Minimal pairs",
    cutBy: "truncation",
    fields: [
      {name: "sentence_good", label: "Sentence", rows: 2},
      {name: "sentence_bad", label: "Other sentence", rows: 2},
    ],
    request: ({sentence_good, sentence_bad}) => ({body: {inputs: {sentence_good, sentence_bad}}}),
    texts: ({sentence_good, sentence_bad}) => [
      named("sentence_good", "Sentence", sentence_good),
      named("sentence_bad", "Other sentence", sentence_bad),
    ],
    view: ({values, answer}) => Bars({rows: likelierFirst(values, answer[0])}),
  },
};

/** The first text of an input. */
const textIn = example => typeof example === "string" ? example : Object.values(example)[0];
const onOneLine = text => lines(text).join(" ");

/** A part of an example as it is typed: in a list, a line is a text. */
const typed = ({isList}, value = "") =>
  isList ? [value].flat().map(onOneLine).join("\n") : value;

/** What the fields of a task hold first: one of the model's examples. */
export function initialValues(task, card, place = 0) {
  const {fields, initial} = TASKS[task], example = card.examples[place];
  const isWhole = fields.every(({name, isList, isOptional, isFlag}) =>
    isOptional || isFlag || Array.isArray(example[name]) === Boolean(isList));
  if (initial && !isWhole) return initial(example);
  if (typeof example === "string") return {[fields[0].name]: typed(fields[0], example)};
  return Object.fromEntries(fields.map(field => [field.name, typed(field, example[field.name])]));
}

export const fieldsOf = task =>
  TASKS[task].cutBy ? [...TASKS[task].fields, CUT] : TASKS[task].fields;

/** The request for an input: {path, body}, a path below the model's URL. */
export function requestOf(task, values) {
  const {request, cutBy} = TASKS[task];
  const {path = "", body} = request(values);
  if (!cutBy || !values.cut) return {path, body};
  return {path, body: path ? {...body, truncate: true}
    : {...body, parameters: {...body.parameters, [cutBy]: true}}};
}
