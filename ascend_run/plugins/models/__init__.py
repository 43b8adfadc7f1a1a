"""Model families: conversion between Hugging Face's and Megatron's format."""
