module @reduce_scatter attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {
  func.func public @main(%arg0: tensor<2x32x128xf8E4M3FN>, %arg1: tensor<f32>) -> (tensor<1x32x128xf8E4M3FN>) {
    %0 = "stablehlo.all_to_all"(%arg0) {split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>} : (tensor<2x32x128xf8E4M3FN>) -> tensor<2x32x128xf8E4M3FN>
    %1 = stablehlo.convert %0 : (tensor<2x32x128xf8E4M3FN>) -> tensor<2x32x128xf32>
    %2 = stablehlo.broadcast_in_dim %arg1, dims = [] : (tensor<f32>) -> tensor<2x32x128xf32>
    %3 = stablehlo.multiply %1, %2 : tensor<2x32x128xf32>
    %4 = stablehlo.constant dense<-0.0> : tensor<f32>
    %5 = stablehlo.reduce(%3 init: %4) applies stablehlo.add across dimensions = [0] : (tensor<2x32x128xf32>, tensor<f32>) -> tensor<32x128xf32>
    %6 = stablehlo.convert %5 : (tensor<32x128xf32>) -> tensor<32x128xf8E4M3FN>
    %7 = stablehlo.reshape %6 : (tensor<32x128xf8E4M3FN>) -> tensor<1x32x128xf8E4M3FN>
    return %7 : tensor<1x32x128xf8E4M3FN>
  }
}
